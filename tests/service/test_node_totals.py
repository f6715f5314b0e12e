"""The sums over a node's processes: what they report is added once, sums never fall, and nonsense changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.errors import DeadlineError
from gdsstore.node import messages
from gdsstore.node.client import NodeClient
from gdsstore.node.errors import ProtocolError
from gdsstore.node.reporting import report_of
from gdsstore.node_link import NodeLink
from gdsstore.observe.activity import BUCKETS, CALLS, MOST, Activity, Moved, Queue
from gdsstore.service.node_totals import MOST_RUNS, NodeTotals, Reporting
from gdsstore.service.refused import RefusedError
from gdsstore.service.reports import checked
from tests.store.helpers import REPO, load, make_keys, opaque, save, small_store

NEW = 0.0  # of counters: younger than any daemon
IO = ("host", "posix", 0, "read", "load")


def activity(nbytes: int, age_s: float = NEW, waiting: int = 0) -> Activity:
    """Of a process that read so much."""
    moved = Moved({IO: (nbytes, nbytes // 4096)}, {"pages_loaded": (nbytes // 4096,)})
    return Activity(moved, {"load": Queue(waiting, 1, float(waiting))}, age_s)


def told(totals: NodeTotals, session: str, run: int, what: Activity, pid: int = 1) -> None:
    totals.take(session, Reporting(bytes([run]) * 16, pid, "server", what, [], 0.0))


class Process:
    """One that reports what it read, under an engine of its own, by which the sums can be told apart."""

    def __init__(self, number: int) -> None:
        self.number, self.run = number, number.to_bytes(16, "big")
        self.read, self.again = 0, False
        self.age_s = 0.0
        self.key = ("host", f"e{number}", 0, "read", "load")
        self.under_way: list[Reporting] = []

    def reports(self, more: int) -> Reporting:
        self.read += more
        self.age_s += 1e-9  # younger than the daemon
        moved = Moved({self.key: (self.read, 0)})
        report = Reporting(self.run, 1, "server", Activity(moved, {}, self.age_s), [], 0.0, again=self.again)
        self.again = True
        return report


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 11),  # a process
            st.sampled_from(["report", "late", "arrive", "leave"]),
            st.integers(0, 1 << 40),
        ),
        max_size=60,
    )
)
def test_no_report_is_added_twice_however_many_processes_come_and_go(
    steps: list[tuple[int, str, int]],
) -> None:
    """Those that are connected are counted in full; of those that come back after they were forgotten, what came since."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gdsstore.service.node_totals.MOST_RUNS", 4)
        totals, processes = NodeTotals(1), [Process(i) for i in range(12)]
        counted: dict[int, int] = defaultdict(int)
        whole: set[int] = set()  # connected without a break since their first report
        for number, what, more in steps:
            process = processes[number]
            if what == "leave":
                totals.leave(f"s{number}")
                whole.discard(number)
            elif what == "late":
                process.under_way.append(process.reports(more))
                whole.discard(number)
            elif what == "arrive" and process.under_way:
                totals.take(f"s{number}", process.under_way.pop(0))
            elif what == "report":
                if not process.again:
                    whole.add(number)
                totals.take(f"s{number}", process.reports(more))
            io = totals.share().moved.io
            for each in processes:
                now = io.get(each.key, (0, 0))[0]
                assert counted[each.number] <= now <= each.read
                assert now == each.read or each.number not in whole
                counted[each.number] = now
            assert len(totals._last) <= max(4, len(totals.clients()))


def test_a_process_that_is_there_is_never_forgotten_for_others_that_come_and_go() -> None:
    totals = NodeTotals(1)
    told(totals, "s", 1, activity(1000))
    for number in range(2000):
        run = Reporting((number + 1000).to_bytes(16, "big"), 2, "short", activity(4096), [], 0.0)
        totals.take("other", run)
        totals.leave("other")
    told(totals, "s", 1, activity(1600))
    assert summed(totals) == 1600 + 2000 * 4096


def test_a_process_that_comes_back_after_it_was_forgotten_is_not_counted_again() -> None:
    totals, process = NodeTotals(1), Process(1)
    totals.take("s", process.reports(1000))
    totals.leave("s")
    for number in range(2000):
        totals.take("other", Reporting((number + 1000).to_bytes(16, "big"), 2, "short", activity(0), [], 0.0))
    totals.leave("other")
    totals.take("s", process.reports(500))
    assert summed(totals) == 1000, "nobody knows how much of the 1500 was told of before"
    totals.take("s", process.reports(70))
    assert summed(totals) == 1070


def test_one_session_that_makes_up_processes_fills_no_memory() -> None:
    totals = NodeTotals(1)
    for number in range(3000):
        totals.take("s", Reporting(number.to_bytes(16, "big"), 2, "x", activity(1), [], 0.0))
    assert len(totals._last) <= MOST_RUNS


def summed(totals: NodeTotals) -> int:
    return totals.share().moved.bytes_of("read")


# --- sums ---


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 1 << 40), st.booleans()), max_size=30
    )
)
def test_what_each_process_did_is_added_once_and_never_taken_away(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """Over whichever connection it comes, and although some reports come late or their session ends."""
    totals, read, age_s, before = NodeTotals(1), defaultdict(int), defaultdict(float), 0
    for run, session, more, ends in steps:
        late = activity(read[run], age_s[run] / 2)
        read[run] += more
        age_s[run] += 1e-9  # younger than the daemon
        told(totals, f"s{session}", run, activity(read[run], age_s[run]))
        told(totals, f"s{session + 6}", run, late)
        if ends:
            totals.leave(f"s{session}")
        assert summed(totals) == sum(read.values()) >= before
        before = summed(totals)


def test_what_was_done_before_the_daemon_was_up_is_left_out() -> None:
    totals = NodeTotals(1)
    told(totals, "s", 1, activity(1000, age_s=3600.0))
    assert summed(totals) == 0
    told(totals, "s", 1, activity(1600, age_s=3601.0))
    assert summed(totals) == 600
    assert totals.clients()[0]["read_bytes"] == 1600  # of the process, since it opened the store


def test_numbers_that_fell_begin_anew() -> None:
    totals = NodeTotals(1)
    for nbytes in (1000, 100, 150):
        told(totals, "s", 1, activity(nbytes))
    assert summed(totals) == 1150


def test_absurd_numbers_stop_where_messages_can_still_carry_them() -> None:
    totals = NodeTotals(1)
    for _ in range(3):
        told(totals, "s", 1, activity(MOST))
        told(totals, "s", 1, activity(0))
    assert summed(totals) == MOST
    msgspec.msgpack.encode(totals.with_own(activity(MOST)).moved.bytes_of("read"))


def test_made_up_engines_do_not_fill_the_memory() -> None:
    totals = NodeTotals(1)

    def rows(salt: int) -> Activity:
        return Activity(
            Moved({("host", f"e{salt}-{i}", 0, "read", "load"): (1, 1) for i in range(1000)}), {}, 0.0
        )

    with pytest.raises(RefusedError):
        for salt in range(100):
            told(totals, "s", salt, rows(salt))
    assert summed(totals) <= 8192
    told(totals, "other", 200, activity(4096))  # what is known already still counts
    before = summed(totals)
    told(totals, "other", 200, activity(8192))
    assert summed(totals) == before + 4096


def test_queues_are_those_of_the_processes_that_are_there() -> None:
    totals = NodeTotals(1)
    told(totals, "a", 1, activity(0, waiting=3))
    told(totals, "b", 2, activity(0, waiting=5))
    assert totals.with_own(activity(0, waiting=1)).queues["load"] == Queue(9, 3, 5.0)
    totals.leave("b")
    assert totals.with_own(activity(0, waiting=1)).queues["load"] == Queue(4, 2, 3.0)


def test_a_process_that_connects_again_is_listed_once() -> None:
    totals = NodeTotals(1)
    told(totals, "old", 1, activity(10), pid=7)
    told(totals, "new", 1, activity(30), pid=7)
    assert [row["pid"] for row in totals.clients()] == [7]
    totals.leave("old")  # noticed late
    assert totals.share().clients == 1
    assert summed(totals) == 30


# --- what a report may say ---


def valid() -> dict[str, Any]:
    counts = list(range(BUCKETS))
    return {
        "kind": "report",
        "run": bytes(16),
        "age_s": 1.5,
        "pid": 7,
        "process": "server",
        "io": [["host", "posix", 1, "read", "load", 4096, 1]],
        "pages": {"pages_loaded": 3, "lookup_hits": 4},
        "times": [["chunk", "write", 0, counts, 0.5], ["wait", "load", None, counts, 0.5]],
        "calls": [["load", 1, 2, 0.25, [1] * len(CALLS)]],
    }


def taken(message: Any) -> Activity:
    request = messages.decode_request(msgspec.msgpack.encode(message))
    assert isinstance(request, messages.Report)
    return checked(request, volumes=2)


def test_a_report_comes_as_it_was_sent(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", daemon="off") as store:
        pages = opaque(store)
        save(pages, make_keys(9))
        load(pages, make_keys(12))
        sent = store.activity()
    came = taken(msgspec.to_builtins(report_of(bytes(16), sent), builtin_types=(bytes,)) | {"kind": "report"})
    assert (came.moved.io, came.moved.calls) == (sent.moved.io, sent.moved.calls)
    for name in ("pages", "times"):
        there = {key: numbers for key, numbers in getattr(sent.moved, name).items() if any(numbers)}
        assert getattr(came.moved, name) == there
    assert came.queues == sent.queues
    assert came.moved.count("pages_loaded") == 9


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, -1), st.just(1 << 63), st.just(float("nan")), st.just(-0.5),
    st.just("\x1b[31m"), st.just("x" * 60), st.just(""), st.just(b"x"), st.just([[]]), st.just({"": -1}),
)  # fmt: skip
PLACES = [
    *(("run",), ("age_s",), ("pid",), ("process",), ("io",), ("pages",), ("times",), ("calls",)),
    *((table, 0) for table in ("io", "times", "calls")),
    *(("io", 0, i) for i in range(7)),
    *(("times", 0, i) for i in range(5)),
    *(("calls", 0, i) for i in range(5)),
    *(("times", 0, 3, 4), ("calls", 0, 4, 2), ("pages", "pages_loaded")),
]


@given(place=st.sampled_from(PLACES), junk=JUNK)
def test_a_report_that_is_wrong_anywhere_is_refused(place: tuple[Any, ...], junk: object) -> None:
    message = valid()
    taken(message)
    *way, name = place
    inside: Any = message
    for step in way:
        inside = inside[step]
    inside[name] = junk
    with pytest.raises((ProtocolError, RefusedError)):
        taken(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"io": [["?", "posix", 0, "read", "load", 1, 1]]},
        {"io": [["host", "posix", 2, "read", "load", 1, 1]]},
        {"io": [["host", "posix", 0, "sideways", "load", 1, 1]]},
        {"io": [["host", "posix", 0, "read", "?", 1, 1]]},
        {"io": [["host", "posix", 0, "read", "load", 1, 1]] * 5000},
        {"pages": {"pages_dreamt_of": 1}},
        {"pages": {f"pages_{i}": 1 for i in range(5000)}},
        {"times": [["chunk", "load", 0, [0] * BUCKETS, 0.0]]},
        {"times": [["wait", "load", 0, [0] * BUCKETS, 0.0]]},
        {"times": [["chunk", "read", 0, [0] * (BUCKETS - 1), 0.0]]},
        {"calls": [["load", 0, 0, 0.0, [0] * (len(CALLS) + 1)]]},
        {"again": 7},
    ],
)
def test_a_report_of_what_no_store_has_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ProtocolError, RefusedError)):
        taken({**valid(), **fields})


# --- what a process sends ---


def test_a_process_without_traffic_sends_little(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", daemon="off") as store:
        assert len(messages.encode(report_of(os.urandom(16), store.activity()))) < 300


def test_only_the_first_report_of_a_process_says_that_it_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of it: what was sent may have been taken."""
    sent: list[bool] = []

    class Daemon:
        reports_sent = 0
        view = None

        def __init__(self) -> None:
            self.reaches = True

        def report(self, run: bytes, activity: Activity, again: bool, deadline: object) -> bool:
            if self.reaches:
                self.reports_sent += 1
                sent.append(again)
                raise DeadlineError("it hangs")
            return False

        def close(self) -> None: ...

    client = NodeClient(tmp_path)
    for reaches in (False, True, False, True):
        daemon = Daemon()
        daemon.reaches = reaches
        client._connection = daemon  # type: ignore[assignment]
        assert not client.report(activity(0))
    assert sent == [False, True]


def test_where_no_daemon_is_nothing_is_even_counted_up(tmp_path: Path) -> None:
    def never() -> Activity:
        raise AssertionError

    assert not NodeLink(tmp_path, None).report(never)


def test_reports_are_sent_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    """Of two threads, the one that looked later must not be overtaken by the other."""
    sent: list[float] = []
    made, lock = iter(range(1000)), threading.Lock()

    class Tier:
        def report(self, activity: Activity) -> bool:
            sent.append(activity.age_s)
            return True

        def close(self) -> None: ...

    link = NodeLink(tmp_path, None)
    link._tier = Tier()  # type: ignore[assignment]

    def count() -> Activity:
        with lock:
            return Activity(Moved(), {}, float(next(made)))

    threads = [threading.Thread(target=lambda: [link.report(count) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent == sorted(sent)
    assert len(sent) == 200


@pytest.mark.parametrize("title", ["sglang::scheduler_TP0", "a\x1b[31m\nb"])
def test_a_process_is_called_by_the_title_that_it_gave_itself(title: str) -> None:
    assert named([title, "-c"]) == title.replace("\x1b", "?").replace("\n", "?")


def test_a_process_without_a_title_is_called_by_its_script(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(NAME)
    assert named([sys.executable, str(script)], code=()) == "worker.py"


NAME = "from gdsstore.node.reporting import process_name; print(process_name())"


def named(command: list[str], code: tuple[str, ...] = (NAME,)) -> str:
    paths = os.pathsep.join([str(REPO), *filter(None, sys.path)])
    done = subprocess.run(
        [*command, *code],
        executable=sys.executable,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()

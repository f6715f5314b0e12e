"""Calls and chunks in threads: everything ends, whatever hangs, fails or is cancelled."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, StoreClosedError, StoreError
from gdsstore.transfer.policy_terms import Caps, Cost, Limits, State, TransferClass
from gdsstore.transfer.scheduler import Scheduler
from gdsstore.transfer.scheduler_jobs import Job
from gdsstore.waiting import Deadline

LOAD, PREFETCH, OFFLOAD, MAINTENANCE = TransferClass
LONG_S = 60.0  # never waited for in full
ONE = {0: Cost(10, 1)}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs in a test waits for it."""
    event = threading.Event()
    yield event
    event.set()


def scheduler(**limits: Any) -> Scheduler:
    return Scheduler(Limits(**limits), [Caps(10, 4)] * 2)


@pytest.fixture
def one() -> Iterator[Scheduler]:
    """A scheduler with a single worker."""
    made = scheduler(workers=1, queued=2, offload_budget_s=0.05)
    yield made
    made.close(LONG_S)


@pytest.fixture
def four() -> Iterator[Scheduler]:
    made = scheduler(workers=4)
    yield made
    made.close(LONG_S)


def submit(
    to: Scheduler,
    work: Callable[[Job[Any]], Any],
    cls: TransferClass = LOAD,
    deadline_s: float = LONG_S,
    **more: Any,
) -> Job[Any]:
    op = Op.WRITE if cls is OFFLOAD else Op.READ
    return to.submit(work, cls=cls, op=op, nbytes=1, deadline=Deadline(deadline_s), **more)


def hang(to: Scheduler, gate: threading.Event, cls: TransferClass = LOAD, **more: Any) -> Job[Any]:
    """A call whose work has begun and waits for the gate."""
    begun = threading.Event()

    def work(_: Job[Any]) -> str:
        begun.set()
        assert gate.wait(LONG_S)
        return "hung"

    job = submit(to, work, cls, **more)
    assert begun.wait(LONG_S)
    return job


def test_work_runs_in_another_thread_and_its_result_is_the_futures(four: Scheduler) -> None:
    assert submit(four, lambda job: threading.get_ident()).result(LONG_S) != threading.get_ident()


def test_what_work_raises_is_the_futures_and_the_worker_goes_on(one: Scheduler) -> None:
    for error in (ValueError("x"), SystemExit(3)):

        def work(_: Job[Any], error: BaseException = error) -> None:
            raise error

        assert submit(one, work).exception(LONG_S) is error
    assert submit(one, lambda job: 5).result(LONG_S) == 5


def test_threads_start_when_they_are_needed_and_no_more_of_them(gate: threading.Event) -> None:
    before = set(threading.enumerate())  # some that other tests have left may end by then
    made = scheduler(workers=4)
    assert not set(threading.enumerate()) - before
    for _ in range(20):
        submit(made, lambda job: None).result(LONG_S)
    jobs = [hang(made, gate) for _ in range(4)]
    assert len(set(threading.enumerate()) - before) <= 4
    gate.set()
    made.close(LONG_S)
    assert all(job.result(0) == "hung" for job in jobs)
    assert not set(threading.enumerate()) - before


def test_a_callback_that_hangs_makes_no_second_thread(one: Scheduler, gate: threading.Event) -> None:
    begun = threading.Event()
    first = hang(one, gate)
    callback_gate = threading.Event()
    first.add_done_callback(lambda _: (begun.set(), callback_gate.wait(LONG_S)))
    gate.set()
    assert begun.wait(LONG_S)
    threads = set(threading.enumerate())
    second = submit(one, lambda job: "second")
    assert not set(threading.enumerate()) - threads
    callback_gate.set()
    assert second.result(LONG_S) == "second"


def test_hanging_offloads_leave_a_worker_to_loads(four: Scheduler, gate: threading.Event) -> None:
    hanging = [hang(four, gate, OFFLOAD) for _ in range(2)]
    more = [submit(four, lambda job: "late", OFFLOAD) for _ in range(5)]
    assert submit(four, lambda job: "load").result(LONG_S) == "load"
    assert not any(job.done() for job in hanging + more)
    gate.set()
    assert [job.result(LONG_S) for job in more] == ["late"] * 5


def test_a_queued_call_is_cancelled_and_never_begun(one: Scheduler, gate: threading.Event) -> None:
    hanging = hang(one, gate)
    ran: list[int] = []
    job = submit(one, lambda job: ran.append(1))
    assert job.cancel()
    assert job.cancelled()
    with pytest.raises(CancelledError):
        job.result(0)
    gate.set()
    assert hanging.result(LONG_S) == "hung"
    assert submit(one, lambda job: 1).result(LONG_S) == 1
    assert ran == []
    assert one.stats().classes["load"].cancelled == 1


def test_a_running_call_that_is_cancelled_is_told_and_its_chunks_are_not_granted(one: Scheduler) -> None:
    asked = threading.Event()

    def work(job: Job[Any]) -> tuple[bool, Any, Any]:
        held = one.admit(job, ONE, 0.0)
        assert held is not None
        threading.Thread(target=lambda: (asked.set(), job.cancel())).start()
        waited = one.admit(job, ONE, LONG_S)  # no room; ends with the cancel
        later = one.admit(job, ONE, LONG_S)
        held.done()
        return job.stopping, waited, later

    job = submit(one, work)
    assert job.result(LONG_S) == (True, None, None)
    assert not job.cancelled()
    assert one.stats().classes["load"].cancelled == 1


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "all workers hang"])
def test_a_call_that_is_not_begun_by_its_deadline_ends_then(
    one: Scheduler, gate: threading.Event, busy: bool
) -> None:
    if busy:
        hang(one, gate)
    deadline_s = 0.05 if busy else -1.0
    plain = submit(one, lambda job: 1, deadline_s=deadline_s)
    with_result = submit(one, lambda job: 1, deadline_s=deadline_s, otherwise=lambda state: state)
    with pytest.raises(DeadlineError):
        plain.result(LONG_S)
    assert with_result.result(LONG_S) is State.EXPIRED


def test_an_offload_that_waits_too_long_is_dropped_while_all_workers_hang(
    one: Scheduler, gate: threading.Event
) -> None:
    hang(one, gate)
    assert submit(one, lambda job: 1, OFFLOAD, otherwise=lambda state: state).result(LONG_S) is State.DROPPED
    with pytest.raises(DeadlineError):
        submit(one, lambda job: 1, OFFLOAD).result(LONG_S)
    assert one.stats().classes["offload"].dropped == 2


def test_a_full_queue_refuses(one: Scheduler, gate: threading.Event) -> None:
    hang(one, gate)
    waiting = [submit(one, lambda job: "ran") for _ in range(2)]
    with pytest.raises(StoreError):
        submit(one, lambda job: 1).result(0)
    assert submit(one, lambda job: 1, otherwise=lambda state: state).result(0) is State.REFUSED
    gate.set()
    assert [job.result(LONG_S) for job in waiting] == ["ran"] * 2


def test_what_the_substitute_raises_is_the_futures(one: Scheduler) -> None:
    def otherwise(_: State) -> int:
        raise KeyError("x")

    assert isinstance(
        submit(one, lambda job: 1, deadline_s=-1.0, otherwise=otherwise).exception(LONG_S), KeyError
    )


def test_a_second_load_of_the_same_keys_shares_the_first_ones_result(
    four: Scheduler, gate: threading.Event
) -> None:
    first = hang(four, gate, keys=frozenset("ab"))
    ran: list[int] = []
    second, third = (submit(four, lambda job: ran.append(1), keys=frozenset("a")) for _ in range(2))
    assert third.cancel()
    assert not second.done()
    gate.set()
    assert first.result(LONG_S) == second.result(LONG_S) == "hung"
    assert ran == []
    assert submit(four, lambda job: "again", keys=frozenset("a")).result(LONG_S) == "again"


def test_who_joined_runs_itself_when_the_first_is_cancelled(four: Scheduler, gate: threading.Event) -> None:
    first = hang(four, gate, keys=frozenset("a"))
    second = submit(four, lambda job: "second", keys=frozenset("a"))
    assert not first.cancel()
    gate.set()
    assert second.result(LONG_S) == "second"


def test_who_waited_for_the_keys_of_a_cancelled_call_runs(four: Scheduler, gate: threading.Event) -> None:
    hang(four, gate, keys=frozenset("a"))
    behind = submit(four, lambda job: 1, keys=frozenset("ab"))
    last = submit(four, lambda job: "last", keys=frozenset("bc"))
    assert behind.cancel()
    assert last.result(LONG_S) == "last"


def test_a_result_that_is_there_belongs_to_a_flight_that_is_over(four: Scheduler) -> None:
    """Who asks for a key again after its load has ended must not be given what that found."""
    for number in range(300):
        job = submit(four, lambda job, number=number: number, keys=frozenset("a"))
        assert job.result(LONG_S) == number


def test_a_chunk_waits_for_room_and_goes_when_there_is_some(four: Scheduler) -> None:
    granted, order = threading.Event(), []

    def holder(job: Job[Any]) -> None:
        with four.admit(job, ONE, LONG_S) as grant:  # type: ignore[union-attr]
            assert grant is not None
            granted.set()
            while not four._sleepers:  # the other one does not wait yet
                threading.Event().wait(0.001)
            order.append("holder")

    def waiter(job: Job[Any]) -> None:
        assert granted.wait(LONG_S)
        grant = four.admit(job, ONE, LONG_S)
        assert grant is not None
        order.append("waiter")
        grant.done()
        grant.done()

    jobs = [submit(four, holder), submit(four, waiter)]
    for job in jobs:
        job.result(LONG_S)
    assert order == ["holder", "waiter"]
    assert four.stats().volumes[0].in_flight_bytes == 0


def test_a_chunk_that_finds_no_room_in_time_is_not_granted_and_leaves_nothing(four: Scheduler) -> None:
    def work(job: Job[Any]) -> list[bool]:
        held = four.admit(job, ONE, LONG_S)
        assert held is not None
        found = [four.admit(job, ONE, timeout_s) is None for timeout_s in (0.0, 0.02)]
        held.done()
        again = four.admit(job, ONE, 0.0)
        assert again is not None
        again.done()
        return found

    assert submit(four, work).result(LONG_S) == [True, True]
    assert not four._sleepers


def test_no_chunk_waits_longer_than_its_call_may_take(four: Scheduler) -> None:
    def work(job: Job[Any]) -> Any:
        held = four.admit(job, ONE, 0.0)
        assert held is not None
        return four.admit(job, ONE, LONG_S)

    assert submit(four, work, deadline_s=0.1).result(LONG_S / 2) is None


def test_late_chunks_keep_their_room_until_the_engine_lets_go(four: Scheduler) -> None:
    grants: list[Any] = []

    def work(job: Job[Any]) -> None:
        grants.append(four.admit(job, ONE, 0.0))
        grants[0].late()

    submit(four, work).result(LONG_S)
    assert four.stats().volumes[0].late_bytes == 10
    grants[0].done()
    assert four.stats().volumes[0].late_bytes == 0


def test_new_caps_let_waiting_chunks_go(four: Scheduler) -> None:
    def work(job: Job[Any]) -> bool:
        held = four.admit(job, ONE, 0.0)
        threading.Timer(0.02, four.set_caps, (0, Caps(20, 4))).start()
        more = four.admit(job, ONE, LONG_S)
        return held is not None and more is not None

    assert submit(four, work).result(LONG_S)


def test_close_cancels_what_waits_and_waits_for_what_runs(gate: threading.Event) -> None:
    made = scheduler(workers=1)
    running, waiting = hang(made, gate), submit(made, lambda job: 1)
    waiting.add_done_callback(lambda _: gate.set())
    made.close(LONG_S)
    assert waiting.cancelled()
    assert running.result(0) == "hung"
    made.close(LONG_S)
    with pytest.raises(StoreClosedError):
        submit(made, lambda job: 1)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_close_ends_the_futures_of_work_that_hangs(gate: threading.Event) -> None:
    made = scheduler(workers=2)
    running = hang(made, gate, keys=frozenset("a"))
    joined = submit(made, lambda job: 1, keys=frozenset("a"))
    made.close(0.05)
    with pytest.raises(DeadlineError):
        running.result(0)
    assert joined.cancelled()
    assert running.stopping
    gate.set()  # what it returns now nobody wants
    assert made.drain(LONG_S)
    made._workers.join(LONG_S)
    assert isinstance(running.exception(0), DeadlineError)


def test_many_threads_and_calls_end_and_leave_nothing() -> None:
    made = scheduler(workers=4, offload_budget_s=60.0)
    jobs: list[Job[Any]] = []

    def work(job: Job[Any]) -> int:
        moved = 0
        for number in range(5):
            grant = made.admit(job, {number % 2: Cost(3 + number, 1)}, LONG_S)
            if grant is None:
                assert job.stopping
                break
            with grant:
                moved += 1
        return moved

    def client(seed: int) -> None:
        for number in range(60):
            cls = TransferClass((seed + number) % 4)
            keys = frozenset((number % 7, seed % 2)) if number % 3 == 0 else frozenset()
            job = submit(made, work, cls, keys=keys)
            jobs.append(job)
            if number % 11 == 0:
                job.cancel()

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert made.drain(LONG_S)
    made.close(LONG_S)
    assert len(jobs) == 240
    assert all(job.cancelled() or job.result(0) in range(6) for job in jobs)
    assert made._policy.idle
    assert not made._sleepers
    assert not made._calls


SCRIPT = """
    import threading, time
    from gdsstore.engines.base import Op
    from gdsstore.transfer import scheduler as module
    from gdsstore.transfer.policy_terms import Caps, Limits, TransferClass
    from gdsstore.waiting import Deadline

    made = module.Scheduler(Limits(workers=1), [Caps(1, 1)])

    def submit(work):
        made.submit(work, cls=TransferClass.LOAD, op=Op.READ, nbytes=1, deadline=Deadline(60))

"""


def run(script: str) -> str:
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=True
    ).stdout


def test_at_exit_what_was_submitted_still_runs() -> None:
    assert run("""
        submit(lambda job: (time.sleep(0.2), print("first", flush=True)))
        submit(lambda job: print("second", flush=True))
    """).split() == ["first", "second"]


def test_work_that_hangs_does_not_keep_the_process() -> None:
    assert run("""
        module.EXIT_TIMEOUT_S = 0.1
        submit(lambda job: threading.Event().wait())
        print("end")
    """).split() == ["end"]

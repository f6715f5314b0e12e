"""Real processes beside a real daemon: its numbers are those of all of them, whoever comes and goes."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gdsstore.node import messages, wire
from gdsstore.node.client import NodeClient
from gdsstore.waiting import Deadline
from tests.service.conftest import Node
from tests.service.daemons import Daemon, filled, prefetched, serving, soon, until
from tests.service.test_node_totals import valid
from tests.service.test_protocol import connection, ended, framed, hello, said, still_serves
from tests.store.helpers import load, make_keys, opaque, save, small_store, start_python

Status = dict[str, Any]

WORKER = """
store = small_store(sys.argv[1])
pages, keys = opaque(store), make_keys(int(sys.argv[3]), sys.argv[2])
assert save(pages, keys).all_ok
assert load(pages, keys)[0].all_ok
print(sum(row.nbytes for row in store.path_report()), flush=True)
sys.stdin.readline()
store.close()
"""


class Worker:
    """A process that saved pages and loaded them again, and has the store open still. `nbytes`: what it moved."""

    def __init__(self, path: Path, salt: str, pages: int) -> None:
        self.process: subprocess.Popen[str] = start_python(WORKER, path, salt, pages)
        assert self.process.stdout is not None
        self.nbytes = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def close(self) -> None:
        self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def node(path: Path) -> Iterator[tuple[Daemon, NodeClient]]:
    """A daemon that moved something itself."""
    store, namespace, keys = filled(path)
    with store, serving(path, "--http", "127.0.0.1:0") as daemon:
        client = NodeClient(path, store_uuid=store.uuid)
        prefetched(client, namespace, keys)
        yield daemon, client
        client.close()


def status(client: NodeClient) -> Status:
    return client.status(soon())


def total(found: Status) -> int:
    return sum(row["bytes"] for row in found["throughput"])


def own(found: Status) -> int:
    return int(found["daemon"]["read_bytes"] + found["daemon"]["written_bytes"])


def pids(found: Status) -> set[int]:
    return {each["pid"] for each in found["clients"]}


def metric(daemon: Daemon, name: str, **labels: str) -> float:
    at = re.search(r"http://\S+:\d+/", daemon.log)
    assert at is not None
    with urllib.request.urlopen(f"{at[0]}metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def test_the_nodes_numbers_are_those_of_all_its_processes_whoever_comes_and_goes(tmp_path: Path) -> None:
    with node(tmp_path / "s") as (daemon, client):
        first, second = Worker(tmp_path / "s", "a", 20), Worker(tmp_path / "s", "b", 30)
        both = first.nbytes + second.nbytes
        until(lambda: total(found := status(client)) == both + own(found))
        found = status(client)
        assert own(found) > 0
        assert pids(found) == {first.pid, second.pid}
        rows = {each["pid"]: each for each in found["clients"]}
        assert rows[second.pid]["read_bytes"] + rows[second.pid]["written_bytes"] == second.nbytes
        assert (rows[second.pid]["name"], rows[second.pid]["connected_s"] > 0) == ("-c", True)
        assert found["pages"]["saved"] == 50
        chunks = [row for row in found["latencies"]["rows"] if (row["what"], row["of"]) == ("chunk", "write")]
        assert sum(sum(row["counts"]) for row in chunks) >= 2  # the daemon itself wrote nothing
        assert metric(daemon, "gdsstore_node_bytes_total") == both + own(found)
        assert metric(daemon, "gdsstore_io_bytes_total") == own(found)  # of its own process
        assert metric(daemon, "gdsstore_node_pages_total", outcome="saved") == 50
        assert metric(daemon, "gdsstore_node_clients") == 2

        first.kill()
        until(lambda: pids(status(client)) == {second.pid})
        found = status(client)
        assert total(found) == both + own(found)

        third = Worker(tmp_path / "s", "c", 10)  # it is started again
        until(lambda: total(found := status(client)) == both + third.nbytes + own(found))
        assert pids(status(client)) == {second.pid, third.pid}
        second.close(), third.close()
        until(lambda: pids(status(client)) == set())
        found = status(client)
        assert total(found) == both + third.nbytes + own(found)


def test_what_was_moved_just_before_a_store_is_closed_counts(tmp_path: Path) -> None:
    filled(tmp_path / "s")[0].close()
    with serving(tmp_path / "s"), closing(NodeClient(tmp_path / "s")) as client:
        with small_store(tmp_path / "s", host_cache="1MiB", write_policy="write_back") as store:
            until(lambda: store.nodes.report(store.activity))
            assert save(opaque(store), make_keys(40, "late")).all_ok  # `close` writes them
        found = status(client)
    assert found["pages"]["saved"] == 40
    assert total(found) - own(found) >= 40 * 8192


def test_a_process_that_was_there_before_the_daemon_brings_only_what_is_new(tmp_path: Path) -> None:
    filled(tmp_path / "s")[0].close()
    with small_store(tmp_path / "s") as store:
        pages = opaque(store)
        save(pages, make_keys(20, "before"))
        for _ in range(2):  # the second daemon knows nothing of the first one
            with serving(tmp_path / "s"):
                client = NodeClient(tmp_path / "s", store_uuid=store.uuid)
                until(lambda client=client: status(client)["clients"])
                moved = sum(row.nbytes for row in store.path_report())
                assert total(status(client)) == 0
                load(pages, make_keys(20, "before"))
                more = sum(row.nbytes for row in store.path_report()) - moved
                until(lambda client=client, more=more: total(status(client)) == more > 0)
                client.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"pages": {"pages_saved": 1 << 40, "?": 1}},
        {"process": "\x1b[31m"},
        {"io": [["host", "x", 9, "read", "load", 1 << 40, 1]]},
    ],
)
def test_a_report_that_is_refused_changes_no_number(node: Node, client: NodeClient, fields: Status) -> None:
    before = status(client)
    with connection(node) as sock:
        sock.sendall(hello(memory=False))
        said(sock)
        sock.sendall(framed(msgspec.msgpack.encode({**valid(), "pages": {}, "io": [], **fields})))
        refused = said(sock)
        assert isinstance(refused, messages.Refused)
        assert refused.code is messages.Refusal.ARGUMENT
        sock.sendall(framed(messages.encode(messages.Ping())))  # it may go on
        assert isinstance(said(sock), messages.Pong)
    still_serves(node, client)
    after = status(client)
    assert (after["pages"], total(after) - own(after)) == (before["pages"], total(before) - own(before))


def test_a_report_that_is_none_ends_its_own_connection(node: Node, client: NodeClient) -> None:
    with connection(node) as sock:
        sock.sendall(hello(memory=False))
        said(sock)
        sock.sendall(framed(msgspec.msgpack.encode({**valid(), "pid": -1})))
        assert ended(sock) == b""
    still_serves(node, client)


def test_a_daemon_that_hangs_costs_a_report_no_more_than_other_calls(
    node: Node, client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.service.test_death import stopped

    activity = node.store.activity()
    until(lambda: client.report(activity))
    waited: list[float] = []
    read = wire.Reader.read

    def reading(self: wire.Reader, deadline: Deadline, most: int = wire.MAX_ANSWER_BYTES) -> bytes | None:
        waited.append(deadline.left_s)
        return read(self, deadline, most)

    monkeypatch.setattr(wire.Reader, "read", reading)
    with stopped(node.daemon):
        assert not client.report(activity)
        assert not client.report(activity)
    assert waited
    assert max(waited) <= 0.05
    until(lambda: client.report(activity))
    client.close()
    assert not client.report(activity)

"""Whoever dies or hangs, the others go on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsstore.node import client as client_module
from gdsstore.node import connection as connection_module
from gdsstore.node import wire
from gdsstore.node.client import REQUEST_S, NodeClient
from gdsstore.waiting import Deadline
from tests.service.conftest import Node
from tests.service.daemons import (
    PATIENCE_S,
    Daemon,
    answered,
    filled,
    leased,
    leases,
    prefetched,
    serving,
    soon,
    until,
)
from tests.store.helpers import start_python, truth


def test_a_worker_that_is_killed_holds_nothing(node: Node, client: NodeClient) -> None:
    prefetched(client, node.namespace, node.keys)
    code = """
        from tests.service.daemons import *
        client = NodeClient(Path(sys.argv[1]))
        keys, digest = make_keys(64), bytes.fromhex(sys.argv[2])
        held = [answered(lambda: client.lease(digest, keys, soon())) for _ in range(3)]
        print(sum(int(lease.found.sum()) for lease in held), flush=True)
        sys.stdin.read()
    """
    workers = [start_python(code, node.directory, node.namespace.digest.hex()) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == str(3 * len(node.keys))
    until(lambda: leases(client) == 6)  # an answer that came late is given back
    workers[0].kill()
    until(lambda: leases(client) == 3)
    workers[1].kill()
    until(lambda: leases(client) == 0)
    for worker in workers:
        worker.communicate()


def test_a_forked_child_keeps_no_connection(node: Node, client: NodeClient) -> None:
    """It can neither use the client nor keep the daemon from seeing its parent die."""
    prefetched(client, node.namespace, node.keys)
    lease = leased(client, node.namespace, node.keys)
    code = """
        from tests.service.daemons import *
        client = NodeClient(Path(sys.argv[1]))
        keys, digest = make_keys(64), bytes.fromhex(sys.argv[2])
        lease = answered(lambda: client.lease(digest, keys, soon()))
        if os.fork():
            os._exit(0)
        lease.close(), client.close()
        print(client.lease(digest, keys, soon()), client.connected, flush=True)
        sys.stdin.read()
    """
    worker = start_python(code, node.directory, node.namespace.digest.hex())
    assert worker.stdout is not None
    assert worker.stdout.readline().strip() == "None False"
    until(lambda: leases(client) == 1)  # the parent's is gone, though the child lives
    lease.close()
    worker.communicate()


def test_a_daemon_that_is_killed_is_missed_by_nobody_and_found_again(tmp_path: Path) -> None:
    store, namespace, keys = filled(tmp_path / "s")
    with store, serving(tmp_path / "s") as daemon:
        client = NodeClient(tmp_path / "s", store_uuid=store.uuid)
        prefetched(client, namespace, keys)
        lease = leased(client, namespace, keys)
        daemon.kill()
        assert client.lease(namespace.digest, keys, soon()) is None
        assert not client.connected
        expected = truth(keys, 8192)  # what was leased can still be read, although nobody keeps it any more
        assert ctypes.string_at(int(lease.address[9]), 8192) == expected[9].tobytes()
        lease.close()
        assert not client.prefetch(namespace.digest, keys, 1.0)
        with serving(tmp_path / "s"):
            assert answered(lambda: client.lookup(namespace.digest, keys, soon())).found.all()
        client.close()


@contextlib.contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_a_daemon_that_hangs_costs_one_short_wait(
    node: Node, client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, keys = node.namespace.digest, node.keys
    prefetched(client, node.namespace, keys)
    leased(client, node.namespace, keys).close()
    waited: list[float] = []
    read = wire.Reader.read

    def reading(self: wire.Reader, deadline: Deadline, most: int = wire.MAX_ANSWER_BYTES) -> bytes | None:
        waited.append(deadline.left_s)
        return read(self, deadline, most)

    monkeypatch.setattr(client_module, "CONNECT_S", 0.2)
    monkeypatch.setattr(connection_module, "HUNG_S", PATIENCE_S)
    with monkeypatch.context() as patch, stopped(node.daemon):
        patch.setattr(wire.Reader, "read", reading)
        for _ in range(20):
            assert client.lease(digest, keys, soon()) is None
        assert client.connected
        assert max(waited) <= REQUEST_S
        assert sum(seconds > 0 for seconds in waited) <= 1  # all but the first did not wait
        patch.setattr(connection_module, "HUNG_S", 0.0)
        assert client.lease(digest, keys, soon()) is None
        assert not client.connected  # it is given up
        for _ in range(1000):
            assert client.lease(digest, keys, soon()) is None
    leased(client, node.namespace, keys).close()
    until(lambda: leases(client) == 0)


def test_a_late_answer_is_not_taken_for_another_one(node: Node, client: NodeClient) -> None:
    """The lease that came too late is given back, and the next question gets its own answer."""
    prefetched(client, node.namespace, node.keys)
    with stopped(node.daemon):
        assert client.lease(node.namespace.digest, node.keys, soon()) is None
    assert answered(lambda: client.lookup(node.namespace.digest, node.keys[:3], soon())).leading == 3
    until(lambda: leases(client) == 0)


def test_sigterm_waits_for_those_who_read(tmp_path: Path) -> None:
    store, namespace, keys = filled(tmp_path / "s")
    with store, serving(tmp_path / "s", "--drain-s", "60") as daemon:
        client = NodeClient(tmp_path / "s", store_uuid=store.uuid)
        prefetched(client, namespace, keys)
        lease = leased(client, namespace, keys)
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in daemon.log)
        until(lambda: not (tmp_path / "s" / "node.sock").exists())
        assert daemon.process.poll() is None
        lease.close()
        assert daemon.wait() == 0
        client.close()


def test_who_does_not_let_go_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    store, namespace, keys = filled(tmp_path / "s")
    with store, serving(tmp_path / "s", "--drain-s", "600") as daemon:
        client = NodeClient(tmp_path / "s", store_uuid=store.uuid)
        prefetched(client, namespace, keys)
        lease = leased(client, namespace, keys)
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in daemon.log)
        assert daemon.process.poll() is None
        assert daemon.terminate() == 1  # the second signal
        lease.close()
        client.close()


def test_requests_while_the_daemon_comes_and_goes_never_raise(tmp_path: Path) -> None:
    store, namespace, keys = filled(tmp_path / "s")
    client, stop, failures = NodeClient(tmp_path / "s"), threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                lease = client.lease(namespace.digest, keys, soon())
                if lease is not None:
                    lease.close()
                client.prefetch(namespace.digest, keys, 1.0)
        except BaseException:
            failures.append(sys.exc_info())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with store:
        with serving(tmp_path / "s"):
            until(lambda: client.connected)
        until(lambda: not client.connected)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    client.close()

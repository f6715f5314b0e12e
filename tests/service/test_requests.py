"""What the daemon does for a process that asks it."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from gdsstore.node.client import NodeClient
from gdsstore.node.connection import Connection
from gdsstore.node.errors import DaemonError
from tests.service.conftest import Node
from tests.service.daemons import answered, leased, leases, prefetched, soon, until
from tests.store.helpers import make_keys, truth


def test_a_lookup_says_what_the_catalog_says(node: Node, client: NodeClient) -> None:
    keys = np.concatenate([node.keys[:5], make_keys(2, "absent"), node.keys[5:9]])
    found = answered(lambda: client.lookup(node.namespace.digest, keys, soon()))
    assert found.leading == 5
    assert found.found.tolist() == [True] * 5 + [False] * 2 + [True] * 4


def test_a_lease_shows_the_records_that_were_prefetched(node: Node, client: NodeClient) -> None:
    prefetched(client, node.namespace, node.keys)
    keys = np.concatenate([node.keys[:7], make_keys(1, "absent"), node.keys[7:]])
    lease = answered(lambda: client.lease(node.namespace.digest, keys, soon()))
    assert np.flatnonzero(~lease.found).tolist() == [7]
    assert lease.address[7] == 0
    expected = truth(keys, 8192)
    for at in np.flatnonzero(lease.found).tolist():
        assert ctypes.string_at(int(lease.address[at]), lease.record_bytes) == expected[at].tobytes()
    lease.close()


def test_a_lease_that_is_closed_is_given_back_once(node: Node, client: NodeClient) -> None:
    prefetched(client, node.namespace, node.keys)
    first, second = (leased(client, node.namespace, node.keys) for _ in range(2))
    first.close()
    first.close()
    until(lambda: leases(client) == 1)
    second.close()
    until(lambda: leases(client) == 0)


def test_leases_that_other_threads_close_are_given_back(node: Node, client: NodeClient) -> None:
    """While one thread asks, others close: none of them may wait, and none may be forgotten."""
    prefetched(client, node.namespace, node.keys)

    def work() -> None:
        for _ in range(20):
            lease = client.lease(node.namespace.digest, node.keys, soon())
            if lease is not None:
                lease.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.connected
    until(lambda: leases(client) == 0)


def test_a_namespace_that_nobody_opened_is_refused_and_nothing_else_is(
    node: Node, client: NodeClient
) -> None:
    for _ in range(20):
        assert client.lookup(bytes(16), node.keys, soon()) is None
        assert not client.prefetch(bytes(16), node.keys, 1.0)
    assert client.connected
    assert answered(lambda: client.lookup(node.namespace.digest, node.keys, soon())).found.all()
    until(
        lambda: f"the namespace {bytes(16).hex()} cannot be served: no namespace of this" in node.daemon.log
    )


def test_a_namespace_that_is_opened_later_is_found(node: Node, client: NodeClient) -> None:
    from tests.store.helpers import opaque, save

    assert client.lookup(opaque(node.store, 4096, pool="later").digest, node.keys, soon()) is None
    later = opaque(node.store, 4096, pool="later")
    assert save(later, node.keys[:3], 4096).all_ok
    found = answered(lambda: client.lookup(later.digest, node.keys, soon()))
    until(
        lambda: (found := client.lookup(later.digest, node.keys, soon())) is not None and found.leading == 3
    )
    assert len(found.found) == len(node.keys)


def test_many_keys_are_looked_up_in_one_call(node: Node, client: NodeClient) -> None:
    keys = np.concatenate([make_keys(5000, "absent"), node.keys])
    found = answered(lambda: client.lookup(node.namespace.digest, keys, soon()))
    assert (found.leading, int(found.found.sum())) == (0, len(node.keys))


@pytest.mark.parametrize("count", [0, 65537])
def test_no_keys_and_too_many_are_not_asked_for(node: Node, client: NodeClient, count: int) -> None:
    keys = np.zeros((count, 32), np.uint8)
    assert client.lease(node.namespace.digest, keys, soon()) is None
    assert not client.prefetch(node.namespace.digest, keys, 1.0)
    assert client.connected


def test_a_prefetch_that_nobody_made_is_unknown(client: NodeClient) -> None:
    assert answered(lambda: client.prefetch_progress(12345, soon())).state == "unknown"
    assert answered(lambda: client.cancel_prefetch(12345, soon())).state == "unknown"


def test_the_status_tells_of_the_daemon_and_the_store(node: Node, client: NodeClient) -> None:
    status = client.status(soon())
    assert status["daemon"]["pid"] == node.daemon.pid
    assert status["daemon"]["clients"] >= 1
    assert status["store"]["uuid"] == node.store.uuid.hex()


def test_who_only_looks_at_the_status_is_no_client(node: Node) -> None:
    """`gdsstore top` beside a node that nobody uses shows none."""

    def clients() -> tuple[int, int]:
        now = time.monotonic()
        until(
            lambda: looking.status(soon())["clock_s"] > now
        )  # one answer is for all who ask within a second
        daemon = looking.status(soon())["daemon"]
        return daemon["clients"], daemon["clients_in_all"]

    with closing(Connection.open(node.directory, b"", soon(), memory=False)) as looking:
        until(lambda: clients()[0] == 0)  # the end of others may be noticed late
        before = clients()[1]
        with closing(Connection.open(node.directory, b"", soon(), memory=False)) as asking:
            assert clients() == (0, before)
            answered(lambda: asking.lookup(node.namespace.digest, node.keys, soon()))
            assert clients() == (1, before + 1)
        with closing(Connection.open(node.directory, b"", soon())):
            until(lambda: clients() == (1, before + 2))
        until(lambda: clients() == (0, before + 2))


def test_a_client_of_another_store_is_refused_and_goes_on(node: Node) -> None:
    stranger = NodeClient(node.directory, store_uuid=bytes(16))
    assert not stranger.connected
    assert stranger.lease(node.namespace.digest, node.keys, soon()) is None
    with pytest.raises(DaemonError, match="another store"):
        stranger.status(soon())

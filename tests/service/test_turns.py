"""What the daemon does for one client does not keep the others, or its end, waiting. Without a process of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gdsstore.namespace import KEY_BYTES
from gdsstore.node import messages, wire
from gdsstore.prefetch import Prefetch
from gdsstore.service.handlers import DIRECT_KEYS, Client, Office
from gdsstore.service.node_totals import NodeTotals
from gdsstore.service.sessions import House, Session

MANY = 3 * DIRECT_KEYS - 5
DIGEST = bytes(16)


class Part:
    """Records that a cache lent: every second one."""

    record_bytes = 4096

    def __init__(self, keys: npt.NDArray[np.uint8]) -> None:
        self.found = np.arange(len(keys)) % 2 == 0
        self.offset = np.arange(len(keys), dtype=np.int64) * 4096
        self.released = False

    def release(self) -> None:
        self.released = True


class Bound:
    """A namespace in a cache. `lent`: all that was lent of it."""

    def __init__(self) -> None:
        self.lent: list[Part] = []

    def hold(self, keys: npt.NDArray[np.uint8], owner: str) -> Part:
        self.lent.append(Part(keys))
        return self.lent[-1]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def office_of(bound: object, executor: ThreadPoolExecutor) -> Office:
    async def status() -> dict[str, Any]:
        return {}

    namespaces: Any = SimpleNamespace(find=lambda digest: bound)
    return Office(namespaces, executor, status, NodeTotals(1), has_cache=True)


def test_a_lease_of_many_keys_lets_others_have_their_turn(executor: ThreadPoolExecutor) -> None:
    bound = Bound()
    client = Client(office_of(bound, executor), "client-1")
    answer = asyncio.run(client.answer(messages.Lease(DIGEST, bytes(KEY_BYTES * MANY))))
    assert [len(part.found) for part in bound.lent] == [DIRECT_KEYS, DIRECT_KEYS, DIRECT_KEYS - 5]
    assert isinstance(answer, messages.Leased)
    found = messages.unpack_mask(answer.mask, MANY)
    assert found.tolist() == [at % DIRECT_KEYS % 2 == 0 for at in range(MANY)]
    assert np.frombuffer(answer.offsets, "<u8").tolist() == [
        at % DIRECT_KEYS * 4096 for at in np.flatnonzero(found).tolist()
    ]
    assert (len(client.leases), client.leases.pages) == (1, int(found.sum()))
    client.leases.release(answer.lease)
    assert all(part.released for part in bound.lent)


def test_a_client_that_goes_while_it_is_lent_records_holds_none(executor: ThreadPoolExecutor) -> None:
    bound = Bound()
    client = Client(office_of(bound, executor), "client-1")

    async def cancelled() -> None:
        lease = asyncio.create_task(client.answer(messages.Lease(DIGEST, bytes(KEY_BYTES * MANY))))
        while not bound.lent:
            await asyncio.sleep(0)
        lease.cancel()
        await asyncio.wait([lease])
        assert lease.cancelled()

    asyncio.run(cancelled())
    assert len(bound.lent) < 3
    assert all(part.released for part in bound.lent)
    assert len(client.leases) == 0


def test_what_a_client_sends_ahead_is_not_answered_in_one_go(executor: ThreadPoolExecutor) -> None:
    requests = 1000
    theirs, ours = socket.socketpair()
    hello = messages.encode(messages.Hello(wire.PROTOCOL_VERSION))
    ping = wire.frame(messages.encode(messages.Ping()), wire.MAX_REQUEST_BYTES)
    theirs.sendall(wire.frame(hello, wire.MAX_HELLO_BYTES) + ping * requests)
    theirs.shutdown(socket.SHUT_WR)
    ours.setblocking(False)

    async def turns_of_others() -> int:
        house = House("0", DIGEST, None, 0)
        session = asyncio.create_task(Session(ours, house, office_of(Bound(), executor), "client-1").run())
        turns = 0
        while not session.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    with theirs:
        assert asyncio.run(turns_of_others()) >= requests


def test_a_prefetch_that_begins_while_the_others_end_ends_too(executor: ThreadPoolExecutor) -> None:
    def begin(*keys: object, **how: object) -> Prefetch:
        office.draining = True
        handle = Prefetch([], 0)
        handle.begin(Future())
        return handle

    office = office_of(SimpleNamespace(prefetch=begin), executor)
    client = Client(office, "client-1")
    asyncio.run(client.answer(messages.Prefetch(DIGEST, bytes(KEY_BYTES * MANY), 60.0)))
    assert client.prefetches.under_way == 0

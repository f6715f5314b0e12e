"""Fuzz: what a client can send to the daemon, in any order and any pieces. The session ends or goes on, and holds nothing after."""

from __future__ import annotations

import asyncio
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

pytest.importorskip("msgspec")

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.errors import ArgumentError
    from gdsstore.node import messages, wire
    from gdsstore.service import sessions, status_moved
    from gdsstore.service.handlers import Office
    from gdsstore.service.node_totals import NodeTotals
    from gdsstore.service.refused import RefusedError

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from tests.fuzz.inputs import Choices, packable  # noqa: E402

STORE = bytes(range(16))
NAMESPACES = (bytes(16), b"\1" * 16, b"\2" * 16)
KINDS = (
    "lookup",
    "prefetch",
    "prefetch_status",
    "prefetch_cancel",
    "lease",
    "release",
    "status",
    "report",
    "ping",
    "hello",
    "?",
)
PATHS = ("host", "direct", "?")
END_S = 20.0


class Bound:
    """What the server sees of a namespace of a store."""

    def __init__(self) -> None:
        self.lent = 0

    def contains(self, keys: Any) -> Any:
        return keys[:, 0] % 2 == 0

    def hold(self, keys: Any, owner: str) -> Any:
        found = keys[:, 0] % 2 == 0
        self.lent += 1

        def release() -> None:
            self.lent -= 1

        return SimpleNamespace(
            found=found, offset=np.zeros(len(keys), np.int64), record_bytes=4096, release=release
        )

    def prefetch(self, keys: Any, *, deadline_s: float, priority: int = 0) -> Any:
        if len(keys) == 3:
            raise ArgumentError("as a store raises")
        assert 0 <= deadline_s <= 86400
        future = SimpleNamespace(cancelled=lambda: False, done=lambda: True, exception=lambda: None)
        progress = SimpleNamespace(warm=0, wanted=len(keys))
        return SimpleNamespace(done=True, future=future, progress=progress, cancel=lambda: None)


class Known:
    def __init__(self) -> None:
        self.bound = Bound()

    def __len__(self) -> int:
        return 1

    def find(self, digest: bytes) -> Any:
        if digest == NAMESPACES[2]:
            raise RefusedError(messages.Refusal.NAMESPACE, "unknown")
        return self.bound


def one_input(data: bytes) -> None:
    asyncio.run(_one_client(Choices(data)))


async def _one_client(choices: Choices) -> None:
    known, totals = Known(), NodeTotals(2)
    with ThreadPoolExecutor(1) as executor:

        async def status() -> dict[str, Any]:
            return {"any": ["thing"]}

        office = Office(known, executor, status, totals, has_cache=True)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(END_S)
        house = sessions.House("0", STORE, None, 0)
        session = sessions.Session(ours, house, office, "client")
        running = asyncio.create_task(session.run())
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(executor, _send, choices, theirs)
            await asyncio.wait_for(running, END_S)
        finally:
            theirs.close()
    assert not session.at_work or session.client.prefetches.under_way == 0
    # A lease without a page is not remembered, and has nothing to give back.
    assert len(session.client.leases) == 0
    assert known.bound.lent >= 0
    assert totals.share().clients == 0
    msgspec.msgpack.encode(status_moved.throughput(totals.share().moved, ["a", "b"]))


def _send(choices: Choices, sock: socket.socket) -> None:
    stream = bytearray()
    if choices.below(8):
        stream += _framed(messages.encode(messages.Hello(wire.PROTOCOL_VERSION, "x", STORE, False)))
    for _ in range(choices.below(6)):
        stream += _message(choices)
    if choices.below(8) == 7 and stream:
        stream[choices.below(len(stream))] ^= 1 << choices.below(8)
    try:
        while stream:
            piece = len(stream) if choices.below(2) == 0 else 1 + choices.below(len(stream))
            sock.sendall(stream[:piece])
            del stream[:piece]
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    except OSError:
        pass  # it was cut off


def _framed(body: bytes) -> bytes:
    return wire.HEADER.pack(len(body)) + body


def _message(choices: Choices) -> bytes:
    kind = choices.below(8)
    if kind == 0:
        return choices.raw(choices.below(64))
    if kind == 1:
        length = choices.one(
            (0, 1, 5, wire.MAX_REQUEST_BYTES, wire.MAX_REQUEST_BYTES + 1, 1 << 31, (1 << 32) - 1)
        )
        return wire.HEADER.pack(length) + choices.raw(choices.below(64))
    if kind == 2:
        return _framed(
            choices.one((b"\x91", b"\x81\xa1a", b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff"))
            * choices.one((1, 3000))
        )
    return _framed(msgspec.msgpack.encode(_request(choices)))


def _request(choices: Choices) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": choices.one(KINDS),
        "namespace": choices.one(NAMESPACES),
        "keys": choices.raw(32) * choices.one((0, 1, 2, 3, 100, 2049)),
        "deadline_s": float(choices.below(100)),
        "priority": choices.below(9) - 4,
        "prefetch": choices.below(4),
        "leases": [choices.below(5) for _ in range(choices.below(4))],
        "run": bytes([choices.below(2)]) * 16,
        "age_s": float(choices.below(9)),
        "pid": choices.below(4),
        "process": choices.one(("server", "\x1b[31m", "")),
        "io": [
            [choices.one(PATHS), "posix", choices.below(3), "read", "load", choices.below(9), 1]
            for _ in range(choices.below(3))
        ],
        "pages": {choices.one(("pages_loaded", "lookup_hits", "?")): choices.below(9)},
        "times": [["chunk", "read", choices.below(3), [1] * choices.one((19, 19, 3)), 0.5]],
        "calls": [["load", 1, 1, 0.5, [1] * choices.one((7, 7, 2))]],
    }
    for _ in range(choices.below(3)):
        name = choices.one(tuple(found))
        value = choices.one((choices.raw(choices.below(40)), packable(choices.json())))
        found[name] = value
    return found


test_a_client_can_send_anything = quickly(one_input, 150)

if __name__ == "__main__":
    fuzz(one_input)

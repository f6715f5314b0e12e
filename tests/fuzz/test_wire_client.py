"""Fuzz: what a daemon can answer to a client, and what it can send along. No address outside of its memory comes out."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

pytest.importorskip("msgspec")

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.errors import DeadlineError
    from gdsstore.memory.shared import SharedArena, SharedView
    from gdsstore.node import messages, wire
    from gdsstore.node.connection import Connection
    from gdsstore.node.errors import DaemonError, ProtocolError
    from gdsstore.waiting import Deadline

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from tests.fuzz.inputs import Choices, packable  # noqa: E402

MEMORY_BYTES = 64 << 10
KEYS = np.arange(5 * 32, dtype=np.uint8).reshape(5, 32)
KINDS = ("welcome", "refused", "found", "started", "progress", "leased", "status_is", "pong", "counted", "?")
STATES = (*(str(each) for each in messages.PrefetchState), "?")


@cache
def memory() -> tuple[SharedArena, SharedView]:
    """The daemon's memory, and the client's view of it."""
    arena = SharedArena(MEMORY_BYTES, huge_pages="off", pin="off")
    return arena, SharedView(arena.shared.fd, MEMORY_BYTES, pin="off")


def one_input(data: bytes) -> None:
    choices = Choices(data)
    memory()
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    try:
        theirs.settimeout(0)
        _hello(choices, ours, theirs) if choices.below(3) == 0 else _requests(choices, ours, theirs)
    finally:
        ours.close()
        theirs.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"


def _hello(choices: Choices, ours: socket.socket, theirs: socket.socket) -> None:
    fds = [memory()[0].shared.fd, 0, 1][: choices.below(4)]
    stream = _message(choices, "welcome") + _message(choices, "welcome")
    try:
        socket.send_fds(theirs, [stream], fds)
        theirs.shutdown(socket.SHUT_WR)
    except OSError:
        return
    try:
        body, fd = wire.Reader(ours).read_with_fd(Deadline(0.05))
    except (ProtocolError, DeadlineError):
        return
    if fd is not None:
        os.close(fd)
    try:
        welcome = messages.decode_answer(body)
    except ProtocolError:
        return
    if isinstance(welcome, messages.Welcome):
        assert 0 <= welcome.memory_bytes < 1 << 63


def _requests(choices: Choices, ours: socket.socket, theirs: socket.socket) -> None:
    view = memory()[1]
    connection = Connection(ours, wire.Reader(ours), view)
    try:
        for _ in range(1 + choices.below(3)):
            asked = choices.below(5)
            _answer(choices, theirs, ("found", "leased", "started", "progress", "status_is")[asked])
            _ask(connection, asked, view)
    except (ProtocolError, DeadlineError, DaemonError):
        pass
    finally:
        connection.close()


def _ask(connection: Connection, asked: int, view: SharedView) -> None:
    soon = Deadline(0.005)
    match asked:
        case 0:
            found = connection.lookup(bytes(16), KEYS, soon)
            assert found is None or found.found.shape == (len(KEYS),)
        case 1:
            lease = connection.lease(bytes(16), KEYS, soon)
            if lease is None:
                return
            there = lease.address[lease.found].astype(object)
            assert (lease.address[~lease.found] == 0).all()
            assert all(view.address <= at for at in there)
            assert all(at + lease.record_bytes <= view.address + view.size_bytes for at in there)
            assert all(at % 4096 == 0 for at in there)
            lease.close()
        case 2:
            connection.prefetch(bytes(16), KEYS, 1.0, 0, soon)
        case 3:
            connection.prefetch_progress(1, soon)
        case _:
            assert isinstance(connection.status(soon), dict)


def _answer(choices: Choices, theirs: socket.socket, kind: str) -> None:
    stream = bytearray(_message(choices, kind))
    if choices.below(8) == 7:
        stream[choices.below(len(stream))] ^= 1 << choices.below(8)
    with contextlib.suppress(OSError):
        theirs.sendall(stream)


def _message(choices: Choices, kind: str) -> bytes:
    match choices.below(8):
        case 0:
            return choices.raw(1 + choices.below(64))
        case 1:
            length = choices.one((0, 1, 5, wire.MAX_ANSWER_BYTES, wire.MAX_ANSWER_BYTES + 1, (1 << 32) - 1))
            return wire.HEADER.pack(length) + choices.raw(choices.below(64))
        case 2:
            body = choices.one((b"\x91", b"\x81\xa1a", b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff"))
            return _framed(body * choices.one((1, 1000)))
    return _framed(msgspec.msgpack.encode(_fields(choices, kind)))


def _framed(body: bytes) -> bytes:
    return wire.HEADER.pack(len(body)) + body


def _fields(choices: Choices, kind: str) -> dict[str, Any]:
    mask = choices.below(32)
    count = mask.bit_count()
    offsets = [
        choices.one((0, 4096, 61440, 65536, 1, (1 << 64) - 4096, choices.below(1 << 16)))
        for _ in range(count)
    ]
    found: dict[str, Any] = {
        "kind": choices.one((kind, kind, kind, choices.one(KINDS))),
        "protocol": choices.one((1, 1, 2)),
        "library": "x",
        "store": bytes(16),
        "memory_bytes": choices.one((MEMORY_BYTES, 0, 1 << 62)),
        "code": choices.one(tuple(str(each) for each in messages.Refusal)),
        "message": "m",
        "leading": choices.below(6),
        "mask": bytes([(mask << 3) & 0xFF]),
        "prefetch": choices.below(9),
        "state": choices.one(STATES),
        "warm": 1,
        "wanted": 2,
        "lease": choices.below(3),
        "record_bytes": choices.one((4096, 8192, MEMORY_BYTES, 0, 1, (1 << 63) - 1)),
        "offsets": np.array(offsets, np.uint64).tobytes(),
        "status": {"a": 1},
    }
    for _ in range(choices.below(3)):
        found[choices.one(tuple(found))] = choices.one(
            (choices.raw(choices.below(24)), packable(choices.json()))
        )
    return found


test_a_daemon_can_answer_anything = quickly(one_input, 200)

if __name__ == "__main__":
    fuzz(one_input)

"""What the bounce engine's tests need: device memory to look at, drives and streams that can be held up, and an engine that is
watched."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gdsstore.engines.base import Engine, Op, RangePlan, Transfer
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.faults import Fault, FaultKind, Window
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.memory.cuda import CudaDevice
from tests.engines.rig import BLOCK, TIMEOUT_S, Bytes, memory, open_file, random_bytes

ARENA_BLOCKS = 64
GROUP_BLOCKS = 8
FILE_BLOCKS = 2 * ARENA_BLOCKS
CONTENT = random_bytes(FILE_BLOCKS * BLOCK, 21)
POISON = 0xEE


def small(inner: Engine | None = None) -> BounceEngine:
    """An engine with an arena of ARENA_BLOCKS blocks, and so groups of GROUP_BLOCKS."""
    engine = BounceEngine(inner or PosixEngine(2), arena_bytes=ARENA_BLOCKS * BLOCK)
    assert engine._group_bytes == GROUP_BLOCKS * BLOCK
    return engine


class DeviceBytes:
    """Device memory of the test's own, which no engine was told of."""

    def __init__(self, nbytes: int, content: Bytes | None = None) -> None:
        self.cuda = CudaDevice(0)
        self.nbytes = nbytes
        self.address = self.cuda.allocate(nbytes)
        if content is not None:
            self.put(content)

    def put(self, content: Bytes) -> None:
        self.cuda.copy(self.address, content.ctypes.data, len(content))

    def get(self) -> Bytes:
        host = memory(self.nbytes)
        self.cuda.copy(host.ctypes.data, self.address, self.nbytes)
        return host

    def plan(
        self, fd: int, offset: list[int], length: int = BLOCK, *, stride: int | None = None
    ) -> RangePlan:
        """Range i lies `i * stride` bytes (as a rule `length`) into the memory."""
        at = np.arange(len(offset), dtype=np.uint64) * np.uint64(length if stride is None else stride)
        return RangePlan(
            np.full(len(offset), fd, np.int32),
            np.array(offset, np.int64),
            np.uint64(self.address) + at,
            np.full(len(offset), length, np.int64),
        )


def blocks(count: int) -> list[int]:
    """The file offsets of the first blocks."""
    return [i * BLOCK for i in range(count)]


def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S / 2) -> None:
    """Wait until it is true, or fail: before a held stream goes on by itself."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


@contextmanager
def held_stream(gpu: ModuleType, engine: BounceEngine, op: Op) -> Iterator[threading.Event]:
    """The engine's copies in one direction stand still until the event is set, or the block is left."""
    with held(gpu, engine._streams[op].handle) as go:
        yield go


@contextmanager
def held(gpu: ModuleType, handle: int) -> Iterator[threading.Event]:
    """A stream stands still until the event is set, or the block is left."""
    go = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go.wait(TIMEOUT_S) and None)
    stream = ctypes.c_void_p(handle)
    gpu.check(gpu.cuda().cuLaunchHostFunc(stream, wait, None))
    try:
        yield go
    finally:
        go.set()
        gpu.cuda().cuStreamSynchronize(stream)  # the callback must not be freed before it has run


class Watched(PosixEngine):
    """Remembers the transfers that it was given."""

    def __init__(self) -> None:
        super().__init__(2)
        self.transfers: list[Transfer] = []

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        self.transfers.append(super().submit(op, plan))
        return self.transfers[-1]

    @property
    def ended(self) -> int:
        return sum(transfer.done for transfer in self.transfers)


OpenFile = Callable[[Engine], int]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenFile]:
    """Opens files of FILE_BLOCKS blocks with CONTENT, attached to an engine: "file-0", "file-1", ..."""
    fds: list[int] = []

    def open_and_attach(engine: Engine) -> int:
        fds.append(fd := open_file(tmp_path / f"file-{len(fds)}", len(CONTENT), content=CONTENT))
        engine.attach(fd, len(CONTENT))
        return fd

    yield open_and_attach
    for fd in fds:
        os.close(fd)


def hanging(*windows: Window) -> FaultyEngine:
    """A drive that hangs in parts of files, or everywhere."""
    matches = windows or (None,)
    return FaultyEngine(PosixEngine(2), [Fault(FaultKind.HANG, match=match) for match in matches], seed=0)

"""A drive under the backend in which things go wrong when a test says so."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from gdsstore import Store
from gdsstore.engines.base import Engine, Op, RangePlan, Transfer
from gdsstore.engines.faults import Mask
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from sglang_backend import stores

T = TypeVar("T")
SGLANG_WAITS_S = 9.0  # a thread that has not come back after 10 s ends the server
PATIENCE_S = 60.0  # far beyond what anything here takes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
MREMAP_MAYMOVE = 1
NOT_MAPPED = ctypes.c_void_p(-1).value


class Drive:
    """Stands in for the engine of every store that is opened. Its one fault happens while `broken`, to ranges that `hits`."""

    def __init__(self, kind: FaultKind, op: Op | None = None, *, pins: bool = False, **more: Any) -> None:
        self.broken = False
        self.hits: Callable[[RangePlan], Mask] = lambda plan: np.ones(len(plan), np.bool_)
        self.kind, self.pins = kind, pins
        self.fault = Fault(kind, op, match=lambda plan: self.hits(plan) & self.broken, **more)
        self.engine: FaultyEngine | None = None
        self.requests = 0

    def open(self, paths: Any, *, config: Any) -> Store:
        self.engine = FaultyEngine(PosixEngine(2), [self.fault], seed=0)
        return Store(paths, config, _Watched(self, self.engine))

    @property
    def count(self) -> int:
        """How many ranges were hit."""
        assert self.engine is not None
        return self.engine.injected[self.kind.value]

    def let_go(self) -> None:
        """It works again, and what hung goes on."""
        self.broken = False
        if self.engine is not None:
            self.engine.release_hangs()

    def returns(self, call: Callable[[], T]) -> T:
        """What the call returns although the drive does not answer; it is let go only if the call never would."""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(call)
            try:
                return future.result(SGLANG_WAITS_S)
            except TimeoutError:
                pytest.fail("the call did not return while the drive was stuck")
            finally:
                if not future.done():
                    self.let_go()

    def hangs(self, call: Callable[[], T]) -> T:
        """As `returns`, for a call that hangs in the drive. On a busy machine its time may be over before it gets there, and then
        it hangs nowhere: it is made again."""
        hung, end = self.count, time.monotonic() + PATIENCE_S
        while True:
            result = self.returns(call)
            if self.count > hung:
                return result
            assert time.monotonic() < end, "no call reached the drive in time"


class _Watched(Engine):
    """Counts requests, and, as the kernel does, has the drive write to the physical pages that it was given: the faulty engine
    alone would write to whatever lies at their address when it goes on."""

    name = "watched"

    def __init__(self, drive: Drive, inner: FaultyEngine) -> None:
        self._drive, self._inner = drive, inner

    def attach(self, fd: int, size: int) -> None:
        self._inner.attach(fd, size)

    def detach(self, fd: int) -> None:
        self._inner.detach(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        self._drive.requests += len(plan)
        if self._drive.pins and self._drive.broken and op is Op.READ:
            address = [pinned(int(at), int(n)) for at, n in zip(plan.address, plan.length, strict=True)]
            plan = RangePlan(plan.fd, plan.file_offset, np.array(address, np.uint64), plan.length)
        return self._inner.submit(op, plan)

    def close(self, timeout_s: float) -> None:
        self._inner.close(timeout_s)


def pinned(address: int, nbytes: int) -> int:
    """Another address of the same physical pages. Only memory that is mapped shared has one, such as SGLang's; the staging arena,
    which nobody replaces, keeps its own."""
    start = address - address % 4096
    size = -(-(address + nbytes - start) // 4096) * 4096
    second = _libc.mremap(start, 0, size, MREMAP_MAYMOVE)
    return address if second in (None, NOT_MAPPED) else int(second) + address - start


def waits(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def install(monkeypatch: pytest.MonkeyPatch, drive: Drive) -> Drive:
    """Give this drive to the stores that backends open from now on."""
    monkeypatch.setattr(stores, "open_store", drive.open)
    return drive

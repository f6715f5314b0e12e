"""What the engines' tests share: real files, aligned memory, and ways to make the kernel hang."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gdsstore.engines.base import Engine, Op, RangePlan
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.by_drive import ByDriveEngine
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.faulty_device import FaultyDeviceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.nixl import NixlEngine
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import EngineError, MissingExtraError
from tests.cudasim.fixtures import need
from tests.engines.on_device import OnDevice

ROOT = Path(__file__).parents[2]
BLOCK = 4096
TIMEOUT_S = 60.0
Bytes = npt.NDArray[np.uint8]

_recent: deque[Bytes] = deque(maxlen=128)

MAKERS: dict[str, Callable[[], Engine]] = {
    "posix": lambda: PosixEngine(4),
    "nixl": lambda: new_nixl(),
    "by-drive": lambda: ByDriveEngine(lambda: PosixEngine(4), drive_of=file_of),
    "faulty-posix": lambda: FaultyEngine(PosixEngine(4), (), seed=0),
    "faulty-nixl": lambda: FaultyEngine(new_nixl(), (), seed=0),
}

# On the simulated GPU, and so in a process of their own.
DEVICE_MAKERS: dict[str, Callable[[], Engine]] = {
    "kvikio-direct": lambda: OnDevice(KvikioEngine(4)),
    "kvikio-compat": lambda: OnDevice(KvikioEngine(4, compat=True)),
    "nixl-gds-mt": lambda: OnDevice(NixlGdsEngine(128, threads=4)),
    "bounce-posix": lambda: OnDevice(BounceEngine(PosixEngine(4), arena_bytes=4 << 20)),
    "bounce-nixl": lambda: OnDevice(BounceEngine(new_nixl(), arena_bytes=4 << 20)),
    "faulty-kvikio": lambda: OnDevice(FaultyDeviceEngine(KvikioEngine(4), (), seed=0)),
}
ON_GPU = pytest.mark.own_process(CUDASIM_POISON=0xEE, NIXL_LOG_LEVEL="FATAL")
ALL_ENGINES = [*sorted(MAKERS), *(pytest.param(name, marks=ON_GPU) for name in sorted(DEVICE_MAKERS))]


def make(name: str, request: pytest.FixtureRequest) -> Engine:
    """The engine called `name`. Skips where it, or the simulated GPU that it needs, cannot be had."""
    if name in MAKERS:
        return MAKERS[name]()
    request.getfixturevalue("gpu")
    for part, packages in (("kvikio", ["kvikio"]), ("nixl", ["nixl", "nixl_cu13"])):
        if part in name:
            need(*packages)
    return DEVICE_MAKERS[name]()


def file_of(fd: int) -> str:
    """As if each file were a drive."""
    return os.readlink(f"/proc/self/fd/{fd}")


def new_nixl(in_flight_ranges: int = 128) -> NixlEngine:
    try:
        return NixlEngine(in_flight_ranges)
    except (MissingExtraError, EngineError) as error:
        pytest.skip(str(error))


def memory(nbytes: int) -> Bytes:
    """Page-aligned zeros. They stay mapped for a while: a plan holds addresses, which keep nothing alive."""
    _recent.append(buffer := np.frombuffer(mmap.mmap(-1, nbytes), np.uint8))
    return buffer


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    buffer = memory(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return buffer


def open_file(path: Path, nbytes: int, *, content: Bytes | None = None, flags: int = os.O_RDWR) -> int:
    """A file of `nbytes`, opened with O_DIRECT where the filesystem does it."""
    path.write_bytes(bytes(nbytes) if content is None else content.tobytes())
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def plan(
    fd: int | Sequence[int], offset: Sequence[int], buffer: Bytes, length: int | Sequence[int]
) -> RangePlan:
    """Range i moves between `offset[i]` and the buffer; the ranges lie one after the other in it."""
    n = len(offset)
    lengths = np.broadcast_to(np.asarray(length, np.int64), n).copy()
    address = np.uint64(buffer.ctypes.data) + (np.cumsum(lengths) - lengths).astype(np.uint64)
    fds = np.broadcast_to(np.asarray(fd, np.int32), n).copy()
    return RangePlan(fds, np.array(offset, np.int64), address, lengths)


def move(engine: Engine, op: Op, ranges: RangePlan) -> None:
    """Move everything, or fail."""
    transfer = engine.submit(op, ranges)
    results = transfer.wait(TIMEOUT_S)
    assert results.complete(ranges).all(), results
    assert transfer.done


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which must end by itself."""
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


class HangingMemory:
    """Pages that hang whoever touches them, the kernel too, until `release`. Skips where userfaultfd is not allowed."""

    def __init__(self, pages: int) -> None:
        if platform.machine() != "x86_64":
            pytest.skip("the number of the system call is not known here")
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)  # userfaultfd
        if self._fd < 0:
            pytest.skip("userfaultfd is not allowed here")
        self.bytes = memory(pages * BLOCK)
        fcntl.ioctl(self._fd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))  # UFFDIO_API
        missing = struct.pack("QQQQ", self.bytes.ctypes.data, pages * BLOCK, 1, 0)
        fcntl.ioctl(self._fd, 0xC020AA00, missing)  # UFFDIO_REGISTER

    def touched(self, times: int) -> None:
        """Wait until somebody hangs here for so many pages. To be called once."""
        found, poller = 0, select.poll()
        poller.register(self._fd, select.POLLIN)
        while found < times:
            assert poller.poll(TIMEOUT_S * 1000), "nobody came here"
            with contextlib.suppress(BlockingIOError):
                found += len(os.read(self._fd, 32 * times)) // 32  # struct uffd_msg

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

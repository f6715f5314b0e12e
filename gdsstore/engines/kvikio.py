"""The kvikio engine: device memory <-> files through cuFile, by blocking calls in threads, with a result for each range.

kvikio loses the errno of failed reads and raises where a range is short in its compat mode. Such a range is moved once more,
by the detour, whose result counts: reading again is harmless, and so is writing the same bytes to the same place.

Before each call kvikio waits for the context's default stream: kernels there hold the I/O up. Those of torch's and SGLang's
other streams do not.
"""

from __future__ import annotations

import errno
import logging
import threading
from typing import Any, NamedTuple

from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.detour import Detour
from gdsstore.engines.device import DeviceEngine, Registered, aligned, touches
from gdsstore.engines.kvikio_files import File, Kvikio, errno_of, last_line
from gdsstore.engines.paths import Path, PathCounters
from gdsstore.engines.workers import SingleTransfer, WorkerEngine, WorkTransfer
from gdsstore.errors import ArgumentError, ConfigError, DeviceError, EngineError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_memory import DeviceView

log = logging.getLogger("gdsstore.engines")

MAX_WORKERS = 128  # cuFile hung with about 256 requests in flight
# In compat mode cuFile takes its buffers from a pool of 64, and one that waited for a buffer waited for ever.
MAX_COMPAT_WORKERS = 32

_left_behind: list[object] = []  # what a call that hangs still uses: Python must not free it, ever


class KvikioEngine(WorkerEngine, DeviceEngine):
    """At most `workers` requests are in flight. `compat`: kvikio's POSIX path instead of cuFile, on any machine.

    Initialises CUDA on `device`. Raises ConfigError for a number of workers that makes no sense, MissingExtraError where
    kvikio is not installed, DeviceError where there is no such device, EngineError where cuFile does not start.
    """

    name = "kvikio"

    def __init__(
        self, workers: int, *, device: int = 0, compat: bool = False, cuda_driver: Any | None = None
    ) -> None:
        if not 1 <= workers <= MAX_WORKERS:
            raise ConfigError("kvikio's workers are 1 to 128", workers=workers)
        self._cuda = CudaDevice(device, cuda_driver)
        try:
            self._kvikio = Kvikio(compat)
        except BaseException:
            self._cuda.close()
            raise
        self.compat = compat  # kvikio's own, past cuFile
        self.cufile = self._kvikio.cufile
        in_host_memory = compat or self.cufile is None or not self.cufile.available
        super().__init__(min(workers, MAX_COMPAT_WORKERS) if in_host_memory else workers)
        self.device = device
        self.path = Path.COMPAT if in_host_memory else Path.DIRECT
        self.moved = PathCounters()
        self.moved_again = 0
        self.registered = Registered()
        self._registering = threading.Lock()
        # Buffers as they were given: address -> bytes, and the base of the allocation, which is what is registered.
        self._buffers: dict[int, tuple[int, int]] = {}
        self._under_way: list[_KvikioTransfer] = []
        self._open: dict[int, File] = {}
        self._detour = Detour(self._cuda, self.moved)
        self._freed = False

    def attach(self, fd: int, size: int) -> None:
        super().attach(fd, size)
        try:
            with self._cuda.entered():
                self._open[fd] = self._kvikio.open(fd)
        except OSError as error:
            super().detach(fd)
            raise EngineError(f"a file cannot be attached: {error.strerror}", fd=fd) from error
        except BaseException:
            super().detach(fd)
            raise

    def detach(self, fd: int) -> None:
        super().detach(fd)
        file = self._open.pop(fd, None)
        if file is not None:
            file.close()

    def register(self, address: int, nbytes: int) -> None:
        """kvikio registers the whole allocation that the memory is in, once for all buffers in it."""
        try:
            base, size = self._cuda.allocation_of(address)
        except DeviceError as error:
            raise ArgumentError(f"not the device's memory: {error}", address=hex(address)) from error
        if address + nbytes > base + size:
            raise ArgumentError("the memory ends before that", address=hex(address), nbytes=nbytes)
        with self._registering:
            for other, (its_bytes, _) in self._buffers.items():
                if other < address + nbytes and address < other + its_bytes:
                    raise ArgumentError(
                        "the memory is registered already", address=hex(address), nbytes=nbytes
                    )
            if all(known != base for _, known in self._buffers.values()):
                self._register(base, size)
            self._buffers[address] = nbytes, base

    def _register(self, base: int, size: int) -> None:
        self.registered.add(base, size)
        try:
            if not self.compat:
                with self._cuda.entered():
                    self._kvikio.register(base, size)
        except BaseException:
            self.registered.discard(base)
            raise

    def deregister(self, address: int) -> None:
        with self._registering:
            nbytes, base = self._buffers.get(address, (0, 0))
            if (self._closed and self.stuck) or (nbytes and self._in_use(address, nbytes)):
                raise EngineError("a call that hangs may still use the memory", address=hex(address))
            if not nbytes:
                return
            if sum(known == base for _, known in self._buffers.values()) == 1:
                if not self.compat:
                    with self._cuda.entered():
                        self._kvikio.deregister(base)
                self.registered.discard(base)
            del self._buffers[address]

    def _in_use(self, address: int, nbytes: int) -> bool:
        with self._lock:
            if self._closed:  # `stuck` tells
                return False
            under_way = [transfer for transfer in self._under_way if not transfer.done]
        return any(touches(transfer.plan, address, nbytes) for transfer in under_way)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        if self._freed:
            return
        if self.stuck:
            _left_behind.append(self)
            return
        self._freed = True
        for fd in list(self._open):
            self.detach(fd)
        for address in list(self._buffers):
            self.deregister(address)
        self._cuda.close()

    def _enter_thread(self) -> None:
        self._cuda.enter()

    def _transfer(self, op: Op, plan: RangePlan) -> WorkTransfer:
        transfer = _KvikioTransfer(self, op, plan)
        with self._lock:
            self._under_way = [other for other in self._under_way if not other.done]
            self._under_way.append(transfer)
        return transfer

    def move(self, op: Op, place: Place, target: Target) -> tuple[int, int]:
        """Bytes moved and errno of one range."""
        file = self._open.get(place.fd)
        if file is None or op not in file.ops or not file.is_at(place.fd):
            return 0, errno.EBADF
        if place.file_offset < 0:
            return 0, errno.EINVAL
        if not target.registered and not self._cuda.holds(place.address, place.length):
            return 0, errno.EFAULT
        try:
            moved = file.move(op, target.buffer, place.length, place.file_offset, target.offset)
        except RuntimeError as error:
            code = errno_of(op, error)
            return (0, code) if code is not None else self._move_again(op, place, error)
        direct = target.direct and file.direct and self.path is Path.DIRECT
        self.moved.add(op, Path.DIRECT if direct else Path.COMPAT, moved, place.fd, label=place.label)
        return moved, 0

    def _move_again(self, op: Op, place: Place, error: RuntimeError) -> tuple[int, int]:
        with self._lock:
            self.moved_again += 1
            first = self.moved_again == 1
        if first:
            log.warning("kvikio failed, so ranges go through host memory (said once): %s", last_line(error))
        return self._detour.move(op, *place)


class Place(NamedTuple):
    """One range of a plan."""

    fd: int
    file_offset: int
    address: int
    length: int
    label: str = ""


class Target(NamedTuple):
    """Where in device memory a range is: `offset` bytes into a buffer, and whether the drive can reach it there."""

    buffer: DeviceView
    offset: int
    registered: bool
    direct: bool


class _KvikioTransfer(SingleTransfer):
    def __init__(self, engine: KvikioEngine, op: Op, plan: RangePlan) -> None:
        super().__init__(op, plan, engine.give_up)
        self._engine = engine
        self._registered, self._base, self._size = engine.registered.find(plan.address, plan.length)
        self._direct = self._registered & aligned(plan)

    def _move_one(self, index: int, fd: int, file_offset: int, address: int, length: int) -> tuple[int, int]:
        buffer = DeviceView(int(self._base[index]), int(self._size[index]))
        registered, direct = bool(self._registered[index]), bool(self._direct[index])
        target = Target(buffer, address - buffer.address, registered, direct)
        return self._engine.move(self.op, Place(fd, file_offset, address, length, self.plan.label), target)

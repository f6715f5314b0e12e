"""The detour: device memory <-> files through a small host buffer a thread.

For ranges that failed on the way they should have gone: it learns which byte it was and the errno, which kvikio and NIXL do
not tell, and moves what can be moved. Not made for speed.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading

import numpy as np

from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.paths import Path, PathCounters
from gdsstore.engines.posix import move_here
from gdsstore.engines.workers import SingleTransfer, WorkerEngine, WorkTransfer
from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice

log = logging.getLogger("gdsstore.engines")

CHUNK_BYTES = 1 << 20


class Detour:
    """Moves single ranges in the calling thread, which waits for the drive. Thread-safe."""

    def __init__(self, device: CudaDevice, moved: PathCounters) -> None:
        self._device, self._moved = device, moved
        self._buffers = threading.local()

    def move(
        self, op: Op, fd: int, file_offset: int, address: int, length: int, label: str = ""
    ) -> tuple[int, int]:
        """Bytes moved and errno. EFAULT where the device memory cannot be reached."""
        # To the driver, an address that is not the device's is host memory: it would be written to.
        if not self._device.holds(address, length):
            return 0, errno.EFAULT
        done = 0
        while done < length:
            step = min(CHUNK_BYTES, length - done)
            try:
                moved, code = self._chunk(op, fd, file_offset + done, address + done, step)
            except DeviceError as error:
                log.warning("%s", str(error))
                return done, errno.EFAULT
            done += moved
            self._moved.add(op, Path.BOUNCE, moved, fd, label=label)
            if code or moved < step:
                # O_DIRECT cannot go on from the odd end of a file: that is a short transfer, as `moved` says.
                return done, code
        return done, 0

    def _chunk(self, op: Op, fd: int, file_offset: int, address: int, length: int) -> tuple[int, int]:
        buffer = self._buffer()
        if op is Op.WRITE:
            self._device.copy(buffer, address, length)
        results = move_here(
            op,
            RangePlan(
                np.array([fd], np.int32),
                np.array([file_offset], np.int64),
                np.array([buffer], np.uint64),
                np.array([length], np.int64),
            ),
        )
        moved = int(results.moved[0])
        if op is Op.READ and moved:
            self._device.copy(address, buffer, moved)
        return moved, int(results.errno[0])

    def _buffer(self) -> int:
        """The address of CHUNK_BYTES aligned bytes of this thread's own."""
        if not hasattr(self._buffers, "array"):
            self._buffers.array = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES), np.uint8)
        return int(self._buffers.array.ctypes.data)


class DetourEngine(WorkerEngine):
    """All ranges by the detour. Does not own the device."""

    name = "detour"

    def __init__(self, threads: int, device: CudaDevice, moved: PathCounters) -> None:
        super().__init__(threads)
        self._detour = Detour(device, moved)

    def _transfer(self, op: Op, plan: RangePlan) -> WorkTransfer:
        known = self._files.sizes(plan.fd) >= 0
        fd = np.where(known, plan.fd, -1)
        plan = RangePlan(fd, plan.file_offset, plan.address, plan.length, plan.label)
        return _DetourTransfer(op, plan, self.give_up, self._detour)


class _DetourTransfer(SingleTransfer):
    def __init__(self, op: Op, plan: RangePlan, give_up: threading.Event, detour: Detour) -> None:
        super().__init__(op, plan, give_up)
        self._detour = detour

    def _move_one(self, index: int, fd: int, file_offset: int, address: int, length: int) -> tuple[int, int]:
        return self._detour.move(self.op, fd, file_offset, address, length, self.plan.label)

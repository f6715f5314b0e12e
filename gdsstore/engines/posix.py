"""The posix engine: `preadv` and `pwritev` in threads. Always there, and the reference for correctness.

Ranges that follow each other in a file go into one call, several buffers at a time.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, Op, RangePlan, RangeResults
from gdsstore.engines.workers import WorkerEngine, WorkTransfer
from gdsstore.layout import ALIGNMENT

IOV_MAX = 1024  # buffers a call, Linux
RUN_BYTES = 1 << 20  # longer runs would leave the other threads idle

# Called through ctypes, not os.preadv: an array of (address, length) pairs is an array of struct iovec as it stands, so that
# no Python object is made for a range, and a bad address is EFAULT from the kernel instead of a crash. ctypes drops the GIL.
_libc = ctypes.CDLL(None, use_errno=True)
_CALLS: dict[Op, Callable[[int, int, int, int], int]] = {Op.READ: _libc.preadv, Op.WRITE: _libc.pwritev}
for _call in (_libc.preadv, _libc.pwritev):
    _call.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
    )  # off_t: 64 bits on 64-bit Linux
    _call.restype = ctypes.c_ssize_t


class PosixEngine(WorkerEngine):
    """Moves ranges with `threads` threads, which start with the first plan."""

    name = "posix"

    def _transfer(self, op: Op, plan: RangePlan) -> WorkTransfer:
        # -1 lets the kernel say EBADF for what is not attached: that number may by now belong to another file.
        known = self._files.sizes(plan.fd) >= 0
        return _PosixTransfer(op, plan, np.where(known, plan.fd, -1), self.give_up)


def move_here(op: Op, plan: RangePlan) -> RangeResults:
    """Move ranges in the calling thread, without a deadline. The files need not be attached."""
    transfer = _PosixTransfer(op, plan, plan.fd, threading.Event())
    transfer.work()
    return transfer.wait(0.0)


class _PosixTransfer(WorkTransfer):
    def __init__(self, op: Op, plan: RangePlan, fd: I32, give_up: threading.Event) -> None:
        n = len(plan)
        self._call = _CALLS[op]
        self._starts = [*run_starts(fd, plan.file_offset, plan.length).tolist(), n]
        self._fd, self._offset, self._length = fd, plan.file_offset, plan.length
        self._iovecs = np.empty((n, 2), np.uint64)  # struct iovec[n]
        self._iovecs[:, 0], self._iovecs[:, 1] = plan.address, plan.length
        self._address = self._iovecs.ctypes.data
        super().__init__(plan, len(self._starts) - 1, give_up)

    def _move(self, run: int) -> None:
        """Together while all goes well, one by one from the first trouble on."""
        first, last = self._starts[run], self._starts[run + 1]
        fd = int(self._fd[first])
        lengths, offsets = self._length[first:last].tolist(), self._offset[first:last].tolist()
        moved, codes = [0] * (last - first), [0] * (last - first)
        at, together = 0, True
        while at < len(lengths):
            count = len(lengths) - at if together else 1
            got = self._call(fd, self._address + 16 * (first + at), count, offsets[at] + moved[at])
            code = 0 if got >= 0 else ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if got <= 0:
                if count > 1:
                    together = False  # it is not known yet whose trouble this is
                    continue
                # O_DIRECT cannot go on from the odd end of a file: that is a short transfer, not an error.
                odd_end = code == errno.EINVAL and moved[at] % ALIGNMENT != 0
                codes[at] = 0 if odd_end else code
                at += 1
                continue
            while got > 0:
                step = min(got, lengths[at] - moved[at])
                moved[at] += step
                got -= step
                if moved[at] == lengths[at]:
                    at += 1
                else:
                    self._iovecs[first + at] += np.array((step, -step), np.int64).view(np.uint64)
        self.set(slice(first, last), moved, codes)


def run_starts(fd: I32, offset: I64, length: I64) -> npt.NDArray[np.intp]:
    """Where a new call starts: at every break in the file, and every RUN_BYTES or IOV_MAX ranges within a run."""
    if len(fd) == 0:
        return np.zeros(0, np.intp)
    index = np.arange(len(fd))
    first = np.append(True, (fd[1:] != fd[:-1]) | (offset[1:] != offset[:-1] + length[:-1]))
    run_start = np.maximum.accumulate(np.where(first, index, 0))
    cell = (offset - offset[run_start] + length - 1) // RUN_BYTES
    buffers = (index - run_start) % IOV_MAX == 0
    return np.flatnonzero(first | buffers | np.append(True, cell[1:] != cell[:-1]))

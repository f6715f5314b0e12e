"""The posix engine: `preadv` and `pwritev` in threads. Always there, and the reference for correctness.

Ranges that follow each other in a file go into one call, several buffers at a time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, Engine, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.files import FileTable
from gdsstore.errors import EngineError
from gdsstore.layout import ALIGNMENT
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.engines")

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


class PosixEngine(Engine):
    """Moves ranges with `threads` threads, which start with the first plan."""

    name = "posix"

    def __init__(self, threads: int) -> None:
        self._wanted = threads
        self._files = FileTable()
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[_PosixTransfer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._give_up = threading.Event()

    def attach(self, fd: int, size: int) -> None:
        self._files.add(fd, size)

    def detach(self, fd: int) -> None:
        self._files.discard(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        # -1 lets the kernel say EBADF for what is not attached: that number may by now belong to another file.
        known = self._files.sizes(plan.fd) >= 0
        transfer = _PosixTransfer(op, plan, np.where(known, plan.fd, -1), self._give_up)
        with self._lock:
            if self._closed:
                raise EngineError("the posix engine is closed: open the store again")
            self._start_threads()
            for _ in range(min(len(self._threads), transfer.runs)):
                self._work.put(transfer)
        return transfer

    def close(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._work.put(None)  # behind what was submitted
        for thread in self._threads:
            thread.join(deadline.left_s)
        self._give_up.set()
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            log.warning(
                "posix engine: %d calls had not ended %.1f s after close; left to the kernel",
                stuck,
                timeout_s,
            )

    def _start_threads(self) -> None:
        while len(self._threads) < self._wanted:
            # Daemons: a call that hangs in the kernel must not keep the process from exiting.
            thread = threading.Thread(
                target=self._serve, name=f"gdsstore-posix-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise EngineError(f"the posix engine could not start a thread: {error}") from error
                log.warning(
                    "posix engine: only %d of %d threads could start", len(self._threads), self._wanted
                )
                self._wanted = len(self._threads)
                return
            self._threads.append(thread)

    def _serve(self) -> None:
        while (transfer := self._work.get()) is not None:
            transfer.work()


class _PosixTransfer(Transfer):
    """The engine's threads take runs of ranges from it until none is left."""

    def __init__(self, op: Op, plan: RangePlan, fd: I32, give_up: threading.Event) -> None:
        n = len(plan)
        self._call = _CALLS[op]
        self._starts = [*run_starts(fd, plan.file_offset, plan.length).tolist(), n]
        self._fd, self._offset, self._length = fd, plan.file_offset, plan.length
        self._iovecs = np.empty((n, 2), np.uint64)  # struct iovec[n]
        self._iovecs[:, 0], self._iovecs[:, 1] = plan.address, plan.length
        self._address = self._iovecs.ctypes.data
        self._moved: I64 = np.zeros(n, np.int64)
        self._errno: I32 = np.full(n, errno.ETIMEDOUT, np.int32)
        self._change = threading.Condition()
        self._claimed = self._ended = 0  # runs
        self._limit = self.runs  # runs that are carried out in the end
        self._give_up = give_up

    @property
    def runs(self) -> int:
        return len(self._starts) - 1

    @property
    def done(self) -> bool:
        with self._change:
            return self._ended == self._limit

    def wait(self, timeout_s: float) -> RangeResults:
        with self._change:
            if not self._change.wait_for(lambda: self._ended == self._limit, timeout_s):
                self._limit = self._claimed  # what nobody has begun is not begun any more
            return RangeResults(self._moved.copy(), self._errno.copy())

    def work(self) -> None:
        while (run := self._claim()) is not None:
            try:
                self._move(self._starts[run], self._starts[run + 1])
            finally:
                with self._change:
                    self._ended += 1
                    if self._ended == self._limit:
                        self._change.notify_all()

    def _claim(self) -> int | None:
        with self._change:
            if self._give_up.is_set():
                self._limit = self._claimed
                self._change.notify_all()
            if self._claimed == self._limit:
                return None
            self._claimed += 1
            return self._claimed - 1

    def _move(self, first: int, last: int) -> None:
        """Move the ranges of a run: together while all goes well, one by one from the first trouble on."""
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
        with self._change:
            self._moved[first:last], self._errno[first:last] = moved, codes


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

"""Work on a device under way: when it has ended, what it found, and the memory that must live until then."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gdsstore.errors import DeviceError, GdsStoreError
from gdsstore.memory.streams import LOST_S, Event, Stream
from gdsstore.transfer.scatter_memory import Scratch
from gdsstore.waiting import Deadline, pause

U64 = npt.NDArray[np.uint64]

_NOT_READY = 600  # from cuda.h
_POLL_MIN_S, _POLL_MAX_S = 20e-6, 1e-3


class Pending:
    """Work that was queued on a stream. `done` may be asked by any thread; the rest is for one at a time."""

    def __init__(self, stream: Stream, count: int, chosen: npt.NDArray[np.intp] | None = None) -> None:
        """`count`: of the sums. `chosen`: the positions in them that the work is about; the others stay 0."""
        self.stream = stream
        self._count = count
        self._chosen = chosen
        self._scratch: list[Scratch] = []
        self._read: Callable[[], U64] | None = None
        self._sums: U64 | None = None
        self._event: Event | None = None
        self._error: GdsStoreError | None = None
        self._failing_since: float | None = None
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether the device has let go of all memory, also where the work failed. Polls; never blocks."""
        if self._ended:
            return True
        try:
            ended = self._idle() if self._event is None else self._event.done
        except DeviceError as error:
            self.fail(error)
            # The work may go on behind a single error: that the memory is free must be seen, not guessed.
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since < LOST_S:
                return False
            # Most likely the context is lost, and nothing runs in it any more. Our own memory is not worth the risk.
            for scratch in self._scratch:
                scratch.abandon()
            ended = True
        self._ended = ended
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done, at most `timeout_s` seconds; whether it is."""
        deadline = Deadline(timeout_s)
        patience = _POLL_MIN_S
        while not self.done:
            if deadline.passed:
                return False
            pause(min(patience, deadline.left_s))
            patience = min(patience * 2, _POLL_MAX_S)
        return True

    @property
    def sums(self) -> U64:
        """The raw checksum sums, uint64 (n,). Raises DeviceError where the work failed, or is not done."""
        if not self.done:
            raise DeviceError("the device is still at work; wait until it is done and then read the sums")
        if self._error is not None:
            raise DeviceError(f"work on pages failed: {self._error}") from self._error
        if self._sums is None:
            self._sums = np.zeros(self._count, np.uint64)
            if self._read is not None:
                self._sums[slice(None) if self._chosen is None else self._chosen] = self._read()
            self._read, self._scratch = None, []
        return self._sums

    # For those who queue the work.

    def keep(self, scratch: Scratch) -> Scratch:
        """Keep memory of the work until it has ended, and its sums were read or nobody is left who could."""
        self._scratch.append(scratch)
        return scratch

    def read(self, sums: Callable[[], U64]) -> None:
        """`sums` is called once, after the work has ended."""
        self._read = sums

    def fail(self, error: GdsStoreError) -> None:
        """Not all of the work was queued, or it failed. The first error is the one that is told."""
        if self._error is None:
            # Its traceback holds frames, and those this object and its memory, until some garbage collection.
            self._error = error.with_traceback(None)

    def seal(self) -> None:
        """Nothing more will be queued, and what was is kept alive until the device has let go of it."""
        try:
            self._event = self.stream.record()
        except DeviceError as error:
            self.fail(error)
        with _lock:
            _under_way.add(self)

    def _idle(self) -> bool:
        """Where there is no event to ask: whether the whole stream has run dry. Raises DeviceError."""
        handle, device = ctypes.c_void_p(self.stream.handle), self.stream.device
        code = device.ask(lambda cuda: cuda.cuStreamQuery(handle))
        if code not in (0, _NOT_READY):
            raise DeviceError("a stream cannot be asked", device=device.ordinal, cuda_error=code)
        return code == 0


# Of all streams: work goes on when its caller, or whoever queued it, is forgotten.
_under_way: set[Pending] = set()
_lock = threading.Lock()


def under_way(stream: Stream) -> list[Pending]:
    """The work on a stream that has not ended. What has ended, on any stream, is let go of."""
    with _lock:
        _under_way.difference_update([pending for pending in _under_way if pending.done])
        return [pending for pending in _under_way if pending.stream is stream]

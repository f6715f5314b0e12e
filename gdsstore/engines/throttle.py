"""An engine around another one that is no faster than it is told: for trying out how a slow drive would do.

Reads and writes have the rate each for themselves, as a data sheet gives them. A plan's ranges are let through to the inner engine
when the time of their bytes has passed, so that the bytes come as late as from a drive of that rate, and results stay the inner
engine's own.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import threading
import time

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, Engine, Op, RangePlan, RangeResults, Transfer
from gdsstore.errors import ConfigError, EngineError
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.engines")

SLICE_S = 0.002  # ranges that are due within this time go together: a request of a few KiB is not worth a plan of its own
LOOK_S = 2e-4  # how often a waiting caller looks whether something is due


class ThrottledEngine(Engine):
    """Moves at most `bytes_per_s` bytes a second through `inner`, in each direction. Closes `inner` with itself."""

    def __init__(self, inner: Engine, bytes_per_s: float) -> None:
        """Raises ConfigError for a rate that is none."""
        if not (bytes_per_s > 0 and math.isfinite(bytes_per_s)):
            raise ConfigError("a rate is above 0 bytes a second", got=bytes_per_s)
        self.name = f"throttled-{inner.name}"
        self.inner = inner
        self._byte_s = 1.0 / bytes_per_s
        self._lock = threading.Lock()
        self._free_s = dict.fromkeys(Op, 0.0)  # on the clock: when all that was submitted has gone through
        self._under_way: list[_ThrottledTransfer] = []
        self._closed = False

    def attach(self, fd: int, size: int) -> None:
        self.inner.attach(fd, size)

    def detach(self, fd: int) -> None:
        self.inner.detach(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        if self._closed:
            raise EngineError("the throttled engine is closed: open the store again")
        with self._lock:
            start_s = max(self._free_s[op], time.monotonic())
            due_s = start_s + np.cumsum(plan.length, dtype=np.float64) * self._byte_s
            self._free_s[op] = float(due_s[-1]) if len(plan) else start_s
        transfer = _ThrottledTransfer(self, op, plan, start_s, due_s)
        with self._lock:
            self._under_way = [*self._under_way, transfer]
        self.advance()
        return transfer

    def advance(self) -> None:
        """Begin what is due of all plans: who waits for one may leave the others unwatched."""
        with self._lock:
            transfers = [transfer for transfer in self._under_way if not transfer.over]
            self._under_way = transfers
        for transfer in transfers:
            transfer.advance()

    def give_back(self, op: Op, nbytes: int) -> None:
        """Bytes that a deadline has ended take no time of those that come later."""
        with self._lock:
            self._free_s[op] -= nbytes * self._byte_s

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline(timeout_s)
        while any(not transfer.done for transfer in self._under_way) and not deadline.passed:
            time.sleep(min(LOOK_S, deadline.left_s))
        late = sum(not transfer.done for transfer in self._under_way)
        if late:
            log.warning("throttled engine: %d transfers had not ended after %.1f s", late, timeout_s)
        self.inner.close(deadline.left_s)


class _ThrottledTransfer(Transfer):
    """Ranges in the plan's order, cut into parts that are due together."""

    def __init__(
        self,
        engine: ThrottledEngine,
        op: Op,
        plan: RangePlan,
        start_s: float,
        due_s: npt.NDArray[np.float64],
    ) -> None:
        self._engine, self._op, self._plan = engine, op, plan
        self._lock = threading.Lock()
        self._moved: I64 = np.zeros(len(plan), np.int64)
        self._errno: I32 = np.full(len(plan), errno.ETIMEDOUT, np.int32)
        cuts = np.flatnonzero(np.diff(((due_s - start_s) / SLICE_S).astype(np.int64))) + 1
        edges = [0, *cuts.tolist(), len(plan)] if len(plan) else [0]
        self._parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self._due_s = [float(due_s[part.stop - 1]) for part in self._parts]
        self._next = 0  # the first part that has not begun
        self._begun: list[tuple[slice, Transfer]] = []
        self.over = False  # like `done`, without looking

    @property
    def done(self) -> bool:
        self._engine.advance()
        return self.over

    def wait(self, timeout_s: float) -> RangeResults:
        deadline = Deadline(timeout_s)
        while not self.done and not deadline.passed:
            time.sleep(min(LOOK_S, deadline.left_s))
        with self._lock:
            self._end()
            return RangeResults(self._moved.copy(), self._errno.copy())

    def advance(self) -> None:
        """Begin what is due, and take the results of what has ended."""
        with self._lock:
            while self._next < len(self._parts) and time.monotonic() >= self._due_s[self._next]:
                part = self._parts[self._next]
                self._next += 1
                try:
                    self._begun.append((part, self._engine.inner.submit(self._op, self._plan.take(part))))
                except EngineError as error:
                    log.error("throttled engine: %d ranges fail: %s", part.stop - part.start, str(error))
                    self._errno[part] = errno.EIO
            running = []
            for part, transfer in self._begun:
                if transfer.done:
                    results = transfer.wait(0.0)
                    self._moved[part], self._errno[part] = results.moved, results.errno
                else:
                    running.append((part, transfer))
            self._begun = running
            self.over = self._next == len(self._parts) and not running

    def _end(self) -> None:
        """After a wait: what has not begun is not begun any more. Somebody may give its memory to others."""
        if self._next < len(self._parts):
            dropped = slice(self._parts[self._next].start, len(self._plan))
            self._engine.give_back(self._op, int(self._plan.length[dropped].sum()))
            self._next = len(self._parts)
        for _, transfer in self._begun:
            transfer.wait(0.0)  # the same holds for the inner engine

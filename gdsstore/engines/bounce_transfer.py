"""A plan under way in the bounce engine."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import numpy as np

from gdsstore.engines.base import I32, I64, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.bounce_cut import Ints, Pieces, cut


class BounceTransfer(Transfer):
    """`cancelled_now` is called where a wait timed out: what the inner engine has not begun is to be called off."""

    def __init__(self, op: Op, plan: RangePlan, limit_bytes: int, cancelled_now: Callable[[], None]) -> None:
        self.op = op
        self.pieces: Pieces = cut(plan, limit_bytes)
        n = len(self.pieces.source)
        self._moved: I64 = np.zeros(n, np.int64)
        self._errno: I32 = np.full(n, errno.ETIMEDOUT, np.int32)
        self._change = threading.Condition()
        self._queued = self._under_way = 0  # groups
        self._cancelled = False
        self._cancelled_now = cancelled_now

    @property
    def cancelled(self) -> bool:
        """No group begins any more, nor its second half."""
        return self._cancelled

    @property
    def done(self) -> bool:
        with self._change:
            return self._over()

    def wait(self, timeout_s: float) -> RangeResults:
        with self._change:
            in_time = self._change.wait_for(self._over, timeout_s)
        if not in_time:
            self.cancel()
        with self._change:
            return self.pieces.results(self._moved, self._errno)

    def cancel(self) -> None:
        with self._change:
            self._cancelled = True
            self._queued = 0
            self._change.notify_all()
        self._cancelled_now()

    def expect(self, groups: int) -> None:
        self._queued = groups

    def claim(self) -> bool:
        """Whether a queued group may begin."""
        with self._change:
            if self._cancelled:
                return False
            self._queued -= 1
            self._under_way += 1
            return True

    def end(self, index: Ints, moved: I64, codes: I32) -> None:
        """The results of a group, which has let go of all memory."""
        with self._change:
            self._moved[index], self._errno[index] = moved, codes
            self._under_way -= 1
            if self._over():
                self._change.notify_all()

    def _over(self) -> bool:
        return self._queued == 0 and self._under_way == 0

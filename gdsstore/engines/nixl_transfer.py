"""A plan under way in the nixl engine, and the parts that it is cut into."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.nixl_ring import Request
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.engines.nixl import NixlEngine

Ints = npt.NDArray[np.intp]


class Part:
    """Some ranges of a plan (`index` says which), as one NIXL transfer or, where `blame`, through the engine for that."""

    __slots__ = ("again", "blame", "index", "nbytes", "owner", "plan", "request", "since")

    def __init__(self, owner: NixlTransfer, index: Ints | slice, blame: bool) -> None:
        self.owner, self.index, self.blame = owner, index, blame
        self.plan = owner.plan.take(index)
        self.nbytes = self.plan.nbytes
        self.since = 0.0  # when it was started, on the monotonic clock
        self.request: Request | None = None
        self.again: Transfer | None = None


class NixlTransfer(Transfer):
    def __init__(self, engine: NixlEngine, op: Op, plan: RangePlan) -> None:
        self.op, self.plan = op, plan
        self._engine = engine
        self._moved: I64 = np.zeros(len(plan), np.int64)
        self._errno: I32 = np.full(len(plan), errno.ETIMEDOUT, np.int32)
        self._lock = threading.Lock()
        self._queued = self._under_way = 0  # parts
        self.cancelled = False
        self._left = plan.nbytes
        self._over = False

    @property
    def done(self) -> bool:
        if not self._over:
            self._engine.glance()
        return self._over

    def wait(self, timeout_s: float) -> RangeResults:
        deadline = Deadline(timeout_s)
        self._engine.advance()
        while not self._over:
            if deadline.passed:
                self.cancel()
                break
            time.sleep(min(self._engine.pause_s(self._left), deadline.left_s))
            self._engine.advance()
        # errno first: a part that ends right now sets it last, so that no range looks moved before it was.
        code = self._errno.copy()
        return RangeResults(self._moved.copy(), code)

    def expect(self, parts: int) -> None:
        self._queued = parts
        self._over = parts == 0

    def claim(self) -> bool:
        """Whether a queued part may start."""
        with self._lock:
            if self.cancelled:
                return False
            self._queued -= 1
            self._under_way += 1
            return True

    def cancel(self) -> None:
        """What has not started does not start any more."""
        with self._lock:
            self.cancelled = True
            self._queued = 0
            self._over = self._under_way == 0
        self._engine.cancel_again(self)

    def end(self, part: Part, moved: I64 | int, code: I32 | int) -> None:
        self._moved[part.index] = moved
        self._errno[part.index] = code
        with self._lock:
            self._under_way -= 1
            self._left -= part.nbytes
            self._over = self._queued == 0 and self._under_way == 0

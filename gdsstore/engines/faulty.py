"""An engine around another one in which things go wrong on purpose: for tests, and for operators' drills.

No trick is played on the inner engine: it is given other plans (shorter, elsewhere, later, from a flipped copy), so that what a
caller sees is what a drive could do to him.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, Engine, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.faults import Fault, FaultKind, Mask, Window, parse_faults
from gdsstore.engines.faulty_bits import Bits, Copy, HostBits
from gdsstore.engines.files import FileTable
from gdsstore.errors import EngineError
from gdsstore.layout import ALIGNMENT
from gdsstore.waiting import Deadline

__all__ = ["Fault", "FaultKind", "FaultyEngine", "Window", "parse_faults"]

log = logging.getLogger("gdsstore.engines")

Ints: TypeAlias = npt.NDArray[np.intp]
LOOK_S = 2e-4  # how often a waiting caller looks whether something is due


class FaultyEngine(Engine):
    """Moves ranges through `inner`, which it closes with itself. A range is hit by at most one fault: the first in `faults`.

    Which ranges are hit follows from `seed` and the order of the plans. `bits`: how to reach the memory that `inner` moves.
    """

    def __init__(
        self, inner: Engine, faults: Sequence[Fault], seed: int, *, bits: Bits | None = None
    ) -> None:
        self.name = f"faulty-{inner.name}"
        self.inner = inner
        self.bits: Bits = HostBits() if bits is None else bits
        self._faults = tuple(faults)
        self._left = [fault.limit for fault in faults]
        self._random = np.random.default_rng(seed)
        self._files = FileTable()
        self._lock = threading.Lock()
        self._injected: Counter[FaultKind] = Counter()
        self._released = 0  # calls of release_hangs
        self._under_way: list[_FaultyTransfer] = []
        self._closed = False

    @property
    def injected(self) -> dict[str, int]:
        """Ranges hit so far, by kind of fault."""
        with self._lock:
            return {kind.value: self._injected[kind] for kind in FaultKind}

    @property
    def releases(self) -> int:
        return self._released

    def release_hangs(self) -> None:
        """Let the ranges that hang now go on. Their bytes move when someone asks for them next."""
        with self._lock:
            self._released += 1

    def attach(self, fd: int, size: int) -> None:
        self.inner.attach(fd, size)
        self._files.add(fd, size)

    def detach(self, fd: int) -> None:
        self._files.discard(fd)
        self.inner.detach(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        if self._closed:
            raise EngineError("the faulty engine is closed: open the store again")
        with self._lock:
            hit = self._choose(op, plan)
            flips = self._random.integers(0, plan.length * 8) if len(plan) else np.zeros(0, np.int64)
        transfer = _FaultyTransfer(self, op, plan, self._faults, hit, flips, self._files.sizes(plan.fd))
        with self._lock:
            self._under_way = [*(other for other in self._under_way if not other.over), transfer]
        return transfer

    def _choose(self, op: Op, plan: RangePlan) -> Ints:
        """Which fault hits each range, as its place in `faults`; -1 for none."""
        hit = np.full(len(plan), -1, np.intp)
        for number, fault in enumerate(self._faults):
            if fault.op not in (None, op):
                continue
            free: Mask = (hit < 0) & (self._random.random(len(plan)) < fault.probability)
            if fault.match is not None:
                free &= fault.match(plan)
            chosen = np.flatnonzero(free)[: self._left[number]]
            hit[chosen] = number
            self._injected[fault.kind] += len(chosen)
            left = self._left[number]
            if left is not None:
                self._left[number] = left - len(chosen)
        return hit

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline(timeout_s)
        while any(not transfer.done for transfer in self._under_way) and not deadline.passed:
            time.sleep(min(LOOK_S, deadline.left_s))
        if self.stuck:
            log.warning("faulty engine: %d transfers hang or are late after %.1f s", self.stuck, timeout_s)
        self.inner.close(deadline.left_s)

    @property
    def stuck(self) -> int:
        """Transfers under way. After `close`: those that hang or are late."""
        return sum(not transfer.done for transfer in self._under_way)


class _Batch:
    """Ranges of a plan that go to the inner engine at the same time: `due_s` on the clock, or after so many releases."""

    def __init__(self, index: Ints, due_s: float = 0.0, releases: int = 0) -> None:
        self.index, self.due_s, self.releases = index, due_s, releases
        self.transfer: Transfer | None = None
        self.over = False


class _FaultyTransfer(Transfer):
    def __init__(
        self,
        engine: FaultyEngine,
        op: Op,
        plan: RangePlan,
        faults: Sequence[Fault],
        hit: Ints,
        flips: I64,
        sizes: I64,
    ) -> None:
        self._engine, self._op, self._flips = engine, op, flips
        self._lock = threading.Lock()
        self._moved: I64 = np.zeros(len(plan), np.int64)
        self._errno: I32 = np.full(len(plan), errno.ETIMEDOUT, np.int32)
        self._copies: list[Copy] = []  # flipped
        kinds = np.array([*(fault.kind for fault in faults), None], dtype=object)[hit]  # hit is -1 for none

        failed = np.flatnonzero(kinds == FaultKind.ERRNO)
        self._errno[failed] = [faults[number].errno_code for number in hit[failed]]
        self._wanted = plan.length
        length, offset, address = plan.length.copy(), plan.file_offset.copy(), plan.address.copy()
        short = kinds == FaultKind.SHORT
        length[short] = (length[short] - 1) // 2 // ALIGNMENT * ALIGNMENT  # O_DIRECT moves whole blocks
        misdirect = kinds == FaultKind.MISDIRECT
        offset[misdirect], lost = _neighbours(plan, sizes, misdirect)
        self._corrupt = kinds == FaultKind.CORRUPT
        if op is Op.WRITE:
            for i in np.flatnonzero(self._corrupt):
                address[i] = self._flipped_copy(plan, int(i))
        # What no engine is asked to move has its result now.
        nothing = (short & (length == 0)) | lost
        self._errno[nothing] = 0
        self._moved[lost] = plan.length[lost]
        self._plan = RangePlan(plan.fd, offset, address, length, plan.label)

        late = (kinds == FaultKind.DELAY) | (kinds == FaultKind.HANG)
        now = np.flatnonzero(~late & ~nothing & (kinds != FaultKind.ERRNO))
        self._batches = [_Batch(now)] if len(now) else []
        for number in np.unique(hit[late]):
            index = np.flatnonzero(hit == number)
            if faults[number].kind is FaultKind.DELAY:
                self._batches.append(_Batch(index, due_s=time.monotonic() + faults[number].delay_s))
            else:
                self._batches.append(_Batch(index, releases=engine.releases + 1))
        self._advance()

    @property
    def over(self) -> bool:
        """Like `done`, without looking."""
        return all(batch.over for batch in self._batches)

    @property
    def done(self) -> bool:
        self._advance()
        return self.over

    def wait(self, timeout_s: float) -> RangeResults:
        deadline = Deadline(timeout_s)
        while not self.done and not deadline.passed:
            time.sleep(min(LOOK_S, deadline.left_s))
        with self._lock:
            return RangeResults(self._moved.copy(), self._errno.copy())

    def _advance(self) -> None:
        """Start what is due, take the results of what has ended, and let go of copies that nothing uses any more."""
        with self._lock:
            for batch in self._batches:
                due = time.monotonic() >= batch.due_s and self._engine.releases >= batch.releases
                if batch.transfer is None and due and not batch.over:
                    self._start(batch)
                if batch.transfer is not None and not batch.over and batch.transfer.done:
                    self._take(batch, batch.transfer.wait(0.0))
            if self.over:
                self._copies.clear()

    def _start(self, batch: _Batch) -> None:
        try:
            batch.transfer = self._engine.inner.submit(self._op, self._plan.take(batch.index))
        except EngineError as error:
            log.error("faulty engine: %d ranges fail: %s", len(batch.index), str(error))
            self._errno[batch.index] = errno.EIO
            batch.over = True

    def _take(self, batch: _Batch, results: RangeResults) -> None:
        batch.over = True
        self._moved[batch.index], self._errno[batch.index] = results.moved, results.errno
        if self._op is Op.READ:
            arrived = batch.index[(results.moved == self._wanted[batch.index]) & self._corrupt[batch.index]]
            for i in arrived:
                self._engine.bits.flip(int(self._plan.address[i]), int(self._flips[i]))

    def _flipped_copy(self, plan: RangePlan, i: int) -> int:
        """The address of a copy of range i with one bit flipped, as long as this transfer is not over; of the range itself
        where that cannot be read: the inner engine will say so."""
        copy = self._engine.bits.copy(int(plan.address[i]), int(plan.length[i]))
        if copy is None:
            return int(plan.address[i])
        self._copies.append(copy)
        self._engine.bits.flip(copy.address, int(self._flips[i]))
        return copy.address


def _neighbours(plan: RangePlan, sizes: I64, chosen: Mask) -> tuple[I64, Mask]:
    """Where the chosen ranges go instead (after their place, else before it), and which of them go nowhere."""
    after, before = plan.file_offset + plan.length, plan.file_offset - plan.length
    offset = np.where(after + plan.length <= sizes, after, before)
    return offset[chosen], chosen & (offset < 0)

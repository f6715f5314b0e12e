"""How a plan is cut for the bounce engine's arena: into pieces that fit, and these into groups of one drive and one lease."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, RangePlan, RangeResults
from gdsstore.layout import ALIGNMENT

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A plan in which no range is longer than a group. `source[i]`: which range piece i is of; non-decreasing, shape (n,)."""

    plan: RangePlan
    source: Ints

    def results(self, moved: I64, codes: I32) -> RangeResults:
        """One result a range, from one a piece: bytes up to the first piece that is not whole, and the errno of that."""
        if len(self.source) == 0:
            return RangeResults(moved.copy(), codes.copy())
        first = np.flatnonzero(np.append(True, self.source[1:] != self.source[:-1]))
        if len(first) == len(self.source):
            return RangeResults(moved.copy(), codes.copy())
        broken = ((codes != 0) | (moved != self.plan.length)).astype(np.int64)
        before = np.cumsum(broken) - broken  # broken pieces before each, in the plan and then in its range
        counts = before == before[first][self.source]
        return RangeResults(
            np.add.reduceat(np.where(counts, moved, 0), first),
            np.add.reduceat(np.where(counts, codes, 0), first, dtype=np.int32),
        )


def cut(plan: RangePlan, limit_bytes: int) -> Pieces:
    """Pieces of at most `limit_bytes`, a multiple of 4 KiB so that what is aligned stays so."""
    count = np.maximum(-(-plan.length // limit_bytes), 1)
    source = np.repeat(np.arange(len(plan)), count)
    if len(source) == len(plan):
        return Pieces(plan, source)
    skip = (np.arange(len(source)) - (np.cumsum(count) - count)[source]) * limit_bytes
    pieces = RangePlan(
        plan.fd[source],
        plan.file_offset[source] + skip,
        plan.address[source] + skip.astype(np.uint64),
        np.minimum(plan.length[source] - skip, limit_bytes),
        plan.label,
    )
    return Pieces(pieces, source)


def room(length: I64) -> I64:
    """Bytes that each piece takes of a lease: O_DIRECT wants them to begin at multiples of 4 KiB. Shape (n,)."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def groups(drive: I64, length: I64, limit_bytes: int) -> Iterator[tuple[int, Ints]]:
    """The drive of each group and which pieces it has: as many as fit into `limit_bytes`, in the plan's order."""
    order = np.argsort(drive, kind="stable")
    drive = drive[order]
    ends = np.cumsum(room(length)[order])
    start = 0
    for stop in [*(np.flatnonzero(drive[1:] != drive[:-1]) + 1).tolist(), len(order)]:
        while start < stop:
            before = int(ends[start - 1]) if start else 0
            fit = int(np.searchsorted(ends, before + limit_bytes, side="right"))
            end = min(max(fit, start + 1), stop)
            yield int(drive[start]), order[start:end]
            start = end

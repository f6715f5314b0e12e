"""From pages to byte ranges: pure numpy, one pass a chunk.

Neighbouring ranges (consecutive slots, consecutive memory) become one request of up to 1 MiB: a drive does far better with
it than with requests of 16 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import RangePlan, RangeResults

MERGE_BYTES = 1 << 20
INTERLEAVE = 4
# Chunks of a call that are with the engine, by bytes: enough for the drive to find work whenever it has done some.
AHEAD_CHUNKS = 8
LAST_SHARE = 8

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The requests of a chunk, and which pages each holds.

    `ranges` are the merged requests; piece i (of page `page[i]`) lies in request `request[i]`, from `within[i]` on.
    """

    ranges: RangePlan
    page: Ints
    request: Ints
    within: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    pages: int

    def moved(self, results: RangeResults) -> npt.NDArray[np.bool_]:
        """Which pages moved whole. Shape (pages,). In a request that came up short, the pages before the end did."""
        reached = results.moved[self.request] >= self.within + self.length
        good = np.logical_and(reached, results.errno[self.request] == 0)
        whole = np.ones(self.pages, np.bool_)
        whole[self.page[~good]] = False
        return whole

    def errors(self, results: RangeResults) -> npt.NDArray[np.int32]:
        """The largest errno that hit each page, 0 for none. Shape (pages,)."""
        worst = np.zeros(self.pages, np.int32)
        np.maximum.at(worst, self.page, results.errno[self.request])
        return worst


def plan_chunk(
    fd: npt.NDArray[np.int32],
    file_offset: npt.NDArray[np.int64],
    address: npt.NDArray[np.uint64],
    length: npt.NDArray[np.int64],
    *,
    merge: bool = True,
    label: str = "",
) -> ChunkPlan:
    """Requests for n pages of k pieces.

    `fd`, `file_offset` (of each page's slot): (n,). `address`, `length`: (n, k); pieces of length 0 are left out.
    """
    n, k = address.shape
    offset = file_offset[:, None] + np.cumsum(length, axis=1) - length
    page = np.repeat(np.arange(n), k)
    fds, offsets, addresses, lengths = np.repeat(fd, k), offset.ravel(), address.ravel(), length.ravel()
    kept = lengths > 0
    if not kept.all():
        page, fds, offsets = page[kept], fds[kept], offsets[kept]
        addresses, lengths = addresses[kept], lengths[kept]
    starts = _starts(fds, offsets, addresses, lengths) if merge else np.arange(len(fds))
    request = np.zeros(len(fds), np.intp)
    request[starts] = 1
    request = np.cumsum(request) - 1
    total = np.add.reduceat(lengths, starts) if len(starts) else lengths
    within = offsets - offsets[starts][request] if len(starts) else offsets
    ranges = RangePlan(fds[starts], offsets[starts], addresses[starts], total, label)
    order, place = _interleaved(len(starts))
    return ChunkPlan(ranges.take(order), page, place[request], within, lengths, n)


def _interleaved(count: int) -> tuple[Ints, Ints]:
    """Every fourth request, then every fourth from the second on, and so on; and where each request went.

    The kernel joins neighbours that arrive one after the other into requests of several MiB, which is 8 to 10 % slower
    (docs/decisions/005).
    """
    order = np.argsort(np.arange(count) % INTERLEAVE, kind="stable")
    place = np.empty(count, np.intp)
    place[order] = np.arange(count)
    return order, place


def _starts(
    fd: npt.NDArray[np.int32],
    offset: npt.NDArray[np.int64],
    address: npt.NDArray[np.uint64],
    length: npt.NDArray[np.int64],
) -> Ints:
    """Where a new request starts: at every break, and every MERGE_BYTES within a run."""
    if len(fd) == 0:
        return np.zeros(0, np.intp)
    joined = (
        (fd[1:] == fd[:-1])
        & (offset[1:] == offset[:-1] + length[:-1])
        & (address[1:] == address[:-1] + length[:-1].astype(np.uint64))
    )
    first = np.append(True, ~joined)
    run_start = np.maximum.accumulate(np.where(first, np.arange(len(fd)), 0))
    reach = offset - offset[run_start]
    # A piece opens a new request where it would reach over the next multiple of MERGE_BYTES from the run's start.
    cell = (reach + length - 1) // MERGE_BYTES
    return np.flatnonzero(first | np.append(True, cell[1:] != cell[:-1]))


def chunks(record_bytes: npt.NDArray[np.int64], chunk_bytes: int, *, taper: bool) -> Iterator[slice]:
    """Cut pages into runs of at most `chunk_bytes` (at least one page each).

    `taper`: towards the end each takes half of what is left, down to an eighth of `chunk_bytes`, since what is still to do for
    the very last one when it has come has no I/O left to hide behind.
    """
    ends = np.cumsum(record_bytes)
    start = 0
    while start < len(ends):
        before = int(ends[start] - record_bytes[start])
        limit = chunk_bytes
        if taper:
            limit = min(max((int(ends[-1]) - before) // 2, chunk_bytes // LAST_SHARE), chunk_bytes)
        stop = int(np.searchsorted(ends, before + limit, side="right"))
        stop = max(stop, start + 1)
        yield slice(start, stop)
        start = stop

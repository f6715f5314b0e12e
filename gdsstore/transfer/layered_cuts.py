"""Which blocks of a record each layer group reads or writes, and where their bytes lie in the caller's memory.

Every block of a record is read once, by the first group that needs a byte of it. A block that two groups share brings some bytes
of the later one early: they are put where they belong at once, so that nothing has to be kept for later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gdsstore.layout import ALIGNMENT, ByteRange, PageLayout
from gdsstore.memory.views import PageMemory
from gdsstore.transfer.groups import LayerGroup


def block_ranges(layout: PageLayout, groups: Sequence[LayerGroup]) -> tuple[tuple[ByteRange, ...], ...]:
    """For each group the byte ranges of a record that it reads, in whole blocks; none where earlier groups read all of its blocks.

    Together they are the whole record. Raises ArgumentError where the layout cannot be cut so.
    """
    left = blocks_of(layout)
    return tuple(take_blocks(layout, group, left) for group in groups)


def block_ranges_of_save(
    layout: PageLayout, groups: Sequence[LayerGroup]
) -> tuple[tuple[ByteRange, ...], ...]:
    """The same for a save: a block that groups share is written with the last of them, when all of its bytes are computed."""
    left = blocks_of(layout)
    return tuple([take_blocks(layout, group, left) for group in reversed(groups)][::-1])


def blocks_of(layout: PageLayout) -> npt.NDArray[np.bool_]:
    """One true value for each block of a record."""
    return np.ones(layout.record_bytes // ALIGNMENT, np.bool_)


def take_blocks(layout: PageLayout, group: LayerGroup, left: npt.NDArray[np.bool_]) -> tuple[ByteRange, ...]:
    """The byte ranges that a group needs of those blocks that are `left`, which they are not any more."""
    needed = np.zeros_like(left)
    for offset, length in layout.slices(group.first, group.last):
        needed[offset // ALIGNMENT : -(-(offset + length) // ALIGNMENT)] = True
    needed &= left
    left &= ~needed
    edges = np.flatnonzero(np.diff(needed, prepend=False, append=False)) * ALIGNMENT
    return tuple(
        ByteRange(start, stop - start)
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    )


class PageCuts:
    """The memory of pages, to be cut at any bytes of their records. Thread-safe."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self._start = np.cumsum(memory.length, axis=1) - memory.length
        # Of each column of pieces, over all pages: most cuts need few of the columns.
        self._first = self._start.min(axis=0, initial=np.iinfo(np.int64).max)
        self._last = (self._start + memory.length).max(axis=0, initial=0)

    def take(self, pages: npt.NDArray[np.intp], part: ByteRange) -> PageMemory:
        """Where that part of the records of `pages` lies, as pages of their own. A piece without bytes has address 0."""
        stop = part.offset + part.length
        columns = np.flatnonzero((self._last > part.offset) & (self._first < stop))
        some = np.ix_(pages, columns)
        start, length = self._start[some], self._memory.length[some]
        low = np.clip(part.offset - start, 0, length)
        inside = np.clip(stop - start, 0, length) - low
        address = np.where(inside > 0, self._memory.address[some] + low.astype(np.uint64), np.uint64(0))
        return PageMemory(np.asarray(address, np.uint64), inside, self._memory.owner, self._memory.ready)

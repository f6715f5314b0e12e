"""Which byte ranges of an arena are free: best fit, lowest offset first, neighbours joined. Not thread-safe."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRanges:
    """Free ranges of `size` bytes. `take` and `give` cost O(log n) steps in Python for n free ranges."""

    def __init__(self, size: int) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, offset), sorted
        self._size_at: dict[int, int] = {}  # offset -> size
        self._start_of: dict[int, int] = {}  # end -> offset
        self._add(0, size)

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes, free no longer; None where no free range is long enough."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        found, offset = self._by_size[at]
        self._drop(offset)
        if found > size:
            self._add(offset + size, found - size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Put a taken range back."""
        before = self._start_of.get(offset)
        after = self._size_at.get(offset + size)
        if after is not None:
            self._drop(offset + size)
            size += after
        if before is not None:
            self._drop(before)
            offset, size = before, offset - before + size
        self._add(offset, size)

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._start_of[offset + size] = offset

    def _drop(self, offset: int) -> None:
        size = self._size_at.pop(offset)
        del self._start_of[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]

"""A plain page-LRU: what a cache of the same capacity, without segments, drive or faults, would hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gdsstore.errors import ArgumentError


class PageLru:
    """Pages by least recent use. A hit counts only as part of a request's unbroken prefix."""

    def __init__(self, capacity_pages: int) -> None:
        """Raises ArgumentError if not even one page fits."""
        if capacity_pages < 1:
            raise ArgumentError("the LRU needs room for at least one page", capacity_pages=capacity_pages)
        self._capacity = capacity_pages
        self._pages: OrderedDict[object, None] = OrderedDict()

    def request(self, pages: Iterable[object]) -> int:
        """How many pages from the start were there; afterwards all of them are, as far as the capacity goes.

        The pages are touched from the last to the first, so that a prefix outlives what builds on it and
        the first pages of a request larger than the capacity stay.
        """
        pages = list(pages)
        held = self._pages
        hit = 0
        while hit < len(pages) and pages[hit] in held:
            hit += 1
        for page in reversed(pages):
            held[page] = None
            held.move_to_end(page)
        while len(held) > self._capacity:
            held.popitem(last=False)
        return hit

    def __len__(self) -> int:
        return len(self._pages)

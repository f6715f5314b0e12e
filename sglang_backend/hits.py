"""Which prefix lengths several pools can restore together. Pure numpy; nothing of SGLang.

A prefix of n pages is restorable by a pool with ALL_PAGES when its pages 0 to n-1 are there, with TRAILING_PAGES and a window w
when pages n-w to n-1 are (those before the sequence's start do not count).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


def leading(present: Mask) -> int:
    """How many pages from the start are there."""
    return len(present) if present.all() else int(present.argmin())


def all_pages(present: Mask) -> Mask:
    """Which lengths 1 to n (at index length - 1) are restorable by a pool that needs every page."""
    return np.asarray(np.logical_and.accumulate(present), np.bool_)


def trailing_pages(present: Mask, window: int) -> Mask:
    """Which lengths are restorable by a pool that needs the last `window` (at least 1) pages of a prefix."""
    n, window = len(present), max(1, window)
    gaps = np.append(0, np.cumsum(~present))  # gaps[i]: pages missing among the first i
    lengths = np.arange(1, n + 1)
    return np.asarray(gaps[lengths] == gaps[np.maximum(lengths - window, 0)], np.bool_)


def block_groups(present: Mask, block_pages: int, group_pages: int) -> int:
    """How many KV pages the complete groups at the start cover. `present`: the pool's own keys, `group_pages` of them a group; a
    group stands for `block_pages` KV pages. 0 where the geometry is not given."""
    if block_pages <= 0 or group_pages <= 0 or not len(present):
        return 0
    return leading(present) // group_pages * block_pages


def longest(restorable: Mask) -> int:
    lengths = np.flatnonzero(restorable)
    return int(lengths[-1]) + 1 if len(lengths) else 0


def together(masks: Iterable[Mask]) -> list[int]:
    """The lengths that all pools can restore, rising. At least one mask."""
    return [int(length) for length in np.flatnonzero(np.logical_and.reduce(list(masks))) + 1]

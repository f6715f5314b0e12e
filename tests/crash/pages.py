"""Numbered pages: key and bytes derive from the number, so any process can tell what a page must hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gdsstore import BoundNamespace, PageLayout, Store
from gdsstore.replay.truth import fill_pages

LANE_BITS = 24  # a number is lane << 24 | position; a lane has one writer at a time, lane 0 has many
PAGE_BYTES = (
    16384,
    20000,
)  # even numbers, odd numbers: in place from aligned memory, and always through staging

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


def keys_of(numbers: I64) -> U8:
    """uint8 (n, 32): distinct for distinct numbers."""
    with np.errstate(over="ignore"):
        spread = numbers.astype(np.uint64)[:, None] * np.uint64(4) + np.arange(1, 5, dtype=np.uint64)
        words = np.asarray(spread, np.uint64)
        words = (words ^ (words >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return np.ascontiguousarray(words ^ (words >> np.uint64(31))).view(np.uint8)


def pages_of(keys: U8, page_bytes: int) -> U8:
    """What these pages must hold, uint8 (n, page_bytes), in memory that is aligned for O_DIRECT."""
    pages = room_for(len(keys), page_bytes)
    fill_pages(keys, pages)
    return pages


def room_for(count: int, page_bytes: int) -> U8:
    raw = np.zeros(count * page_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + count * page_bytes].reshape(count, page_bytes)


def namespaces(store: Store) -> tuple[BoundNamespace, ...]:
    """The namespace of even numbers and that of odd ones."""
    return tuple(store.namespace(model="crash", layout=PageLayout.opaque(size)) for size in PAGE_BYTES)

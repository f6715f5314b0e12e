"""What stands in the catalog for runs of pages: their extents, and an entry for each page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gdsstore.catalog.keys import U64
from gdsstore.catalog.lookup import EXTENT_KEY
from gdsstore.catalog.records import EXTENT_PAGES, IDENT, ITEM, PAGE, Extent, Run


def extents_of(run: Run, namespace_digest: bytes) -> Iterator[tuple[bytes, bytes]]:
    idents, items = np.empty(len(run), IDENT), np.empty(len(run), ITEM)
    idents["index"], idents["tag"] = run.index, run.tag
    items["checksum"], items["payload_bytes"], items["live"] = run.checksum, run.payload_bytes, 1
    for start in range(0, len(run), EXTENT_PAGES):
        part = slice(start, start + EXTENT_PAGES)
        value = Extent.encode(namespace_digest, run.generation, idents[part], items[part])
        yield EXTENT_KEY.pack(run.segment, run.first + start), value


def pages_of(run: Run) -> list[tuple[bytes, bytes]]:
    return page_items(
        run.index,
        run.tag,
        np.full(len(run), run.segment, np.uint32),
        run.first + np.arange(len(run), dtype=np.uint32),
        run.first + np.arange(len(run), dtype=np.uint32) // EXTENT_PAGES * EXTENT_PAGES,
    )


def page_items(index: U64, tag: U64, segment: Any, slot: Any, first: Any) -> list[tuple[bytes, bytes]]:
    """(LMDB key, value) of n pages, from arrays of shape (n,)."""
    values = np.empty(len(index), PAGE)
    values["tag"], values["segment"], values["slot"], values["first"] = tag, segment, slot, first
    keys, raw, size = index.tobytes(), values.tobytes(), PAGE.itemsize
    return [(keys[8 * i : 8 * i + 8], raw[size * i : size * i + size]) for i in range(len(index))]

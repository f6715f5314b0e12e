"""Looking pages up: from index keys to slots and locations, inside one read transaction.

Two ways, chosen by what the keys turn out to be. Pages of one prefix were written together, so after one B-tree descent the
extent of the page answers for the next up to 60 keys with one comparison of bytes. Keys that do not run along extents are
fetched one by one, and the rest is vectorised.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.keys import U64
from gdsstore.catalog.records import EXTENT_HEADER, IDENT, ITEM, PAGE, Extent, Locations

_PAGE = struct.Struct("<QIII")
_COUNTS = struct.Struct("<II")  # pages and dead pages, at the end of an extent's header
_HEADER = EXTENT_HEADER.itemsize
_IDENT = IDENT.itemsize
_GIVE_UP_AFTER = 2  # extents that answered for one key only

EXTENT_KEY = struct.Struct(">II")  # big-endian: a segment's extents lie together, in slot order


class Places(NamedTuple):
    """Which of n pages are there and in which slots; arrays of shape (n,). Slots hold only where `found`."""

    found: npt.NDArray[np.bool_]
    segment: npt.NDArray[np.uint32]
    slot: npt.NDArray[np.uint32]
    first: npt.NDArray[np.uint32]  # slot with which the page's extent begins


class _Run(NamedTuple):
    at: int
    pages: int
    segment: int
    slot: int
    first: int


def places(txn: Any, pages: Any, extents: Any, index: U64, tag: U64, *, prefix: bool) -> Places:
    """Slots of n keys. With `prefix`, stops at the first key that is not there; later ones are not found.

    `txn` is an LMDB read transaction (buffers off), `pages` and `extents` its databases.
    """
    n = len(index)
    idents = np.empty(n, IDENT)
    idents["index"], idents["tag"] = index, tag
    want, keys = idents.tobytes(), index.tobytes()
    runs: list[_Run] = []
    at = useless = 0
    while at < n and useless < _GIVE_UP_AFTER:
        value = txn.get(keys[8 * at : 8 * at + 8], db=pages)
        run = None if value is None else _along_extent(txn, extents, value, want, at, n)
        if run is None:
            if prefix:
                return _places(n, runs)
            at, useless = at + 1, useless + 1
            continue
        runs.append(run)
        at += run.pages
        useless = 0 if run.pages > 1 else useless + 1
    found = _places(n, runs)
    if at < n:
        _one_by_one(txn, pages, keys, tag, at, found, prefix=prefix)
    return found


def _along_extent(txn: Any, extents: Any, value: bytes, want: bytes, at: int, n: int) -> _Run | None:
    """The keys from `at` on that lie one after the other in one extent."""
    _, segment, slot, first = _PAGE.unpack(value)
    extent = txn.get(EXTENT_KEY.pack(segment, first), db=extents)
    if extent is None:
        return None
    pages, dead = _COUNTS.unpack_from(extent, _HEADER - _COUNTS.size)
    count = min(pages - (slot - first), n - at)
    if count <= 0:
        return None
    start = _HEADER + (slot - first) * _IDENT
    if dead == 0 and extent[start : start + count * _IDENT] == want[at * _IDENT : (at + count) * _IDENT]:
        return _Run(at, count, segment, slot, first)
    decoded = Extent.decode(extent)
    part = slice(slot - first, slot - first + count)
    mine = np.frombuffer(want, IDENT, count, at * _IDENT)
    same = np.append((decoded.idents[part] == mine) & (decoded.items["live"][part] != 0), False)
    count = int(same.argmin())
    return _Run(at, count, segment, slot, first) if count else None


def _places(n: int, runs: list[_Run]) -> Places:
    out = Places(
        np.zeros(n, np.bool_), np.zeros(n, np.uint32), np.zeros(n, np.uint32), np.zeros(n, np.uint32)
    )
    for run in runs:
        part = slice(run.at, run.at + run.pages)
        out.found[part] = True
        out.segment[part], out.first[part] = run.segment, run.first
        out.slot[part] = np.arange(run.slot, run.slot + run.pages, dtype=np.uint32)
    return out


def _one_by_one(
    txn: Any, pages: Any, keys: bytes, tag: U64, start: int, out: Places, *, prefix: bool
) -> None:
    get = txn.get
    values = [get(keys[i : i + 8], db=pages) for i in range(8 * start, len(keys), 8)]
    there = np.array([value is not None for value in values], np.bool_)
    hits = np.frombuffer(b"".join(value for value in values if value is not None), PAGE)
    at = start + np.flatnonzero(there)
    right = hits["tag"] == tag[at]
    hits, at = hits[right], at[right]
    if prefix:
        unbroken = int(np.append(at == np.arange(start, start + len(at)), False).argmin())
        hits, at = hits[:unbroken], at[:unbroken]
    out.found[at] = True
    out.segment[at], out.slot[at], out.first[at] = hits["segment"], hits["slot"], hits["first"]


def resolve(txn: Any, pages: Any, extents: Any, index: U64, tag: U64) -> Locations:
    """Everything that a load needs to know of n keys: slots, and what their extents say of them."""
    where = places(txn, pages, extents, index, tag, prefix=False)
    out = Locations.none(len(index))
    at = np.flatnonzero(where.found)
    if len(at) == 0:
        return out
    packed = where.segment[at].astype(np.uint64) << np.uint64(32) | where.first[at]
    wanted, inverse = np.unique(packed, return_inverse=True)
    raw = wanted.astype(">u8").tobytes()  # the same bytes as EXTENT_KEY
    blobs = [txn.get(raw[i : i + 8], db=extents) for i in range(0, len(raw), 8)]
    decoded = [None if blob is None else Extent.decode(blob) for blob in blobs]
    sizes = np.array([0 if extent is None else len(extent.idents) for extent in decoded], np.int64)
    generations = np.array([0 if extent is None else extent.generation for extent in decoded], np.uint64)
    known = [extent for extent in decoded if extent is not None]
    idents = np.concatenate([np.zeros(0, IDENT), *(extent.idents for extent in known)])
    items = np.concatenate([np.zeros(0, ITEM), *(extent.items for extent in known)])
    within = where.slot[at].astype(np.int64) - where.first[at]
    inside = within < sizes[inverse]
    at, inverse, within = at[inside], inverse[inside], within[inside]
    chosen = (np.cumsum(sizes) - sizes)[inverse] + within
    good = (
        (idents["index"][chosen] == index[at])
        & (idents["tag"][chosen] == tag[at])
        & (items["live"][chosen] != 0)
    )
    at, inverse, chosen = at[good], inverse[good], chosen[good]
    out.found[at] = True
    out.segment[at], out.slot[at] = where.segment[at], where.slot[at]
    out.generation[at] = generations[inverse]
    out.checksum[at], out.payload_bytes[at] = items["checksum"][chosen], items["payload_bytes"][chosen]
    return out

"""The catalog's pages of one segment, and whether the segment's table says the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.index import Catalog
from gdsstore.catalog.keys import U64, index_keys
from gdsstore.catalog.lookup import EXTENT_KEY
from gdsstore.catalog.records import IDENT, ITEM, Extent, Locations
from gdsstore.verify.result import Damage, Kind
from gdsstore.verify.table import Table
from gdsstore.volume.format import FLAG_DELETED, Entries

Mask = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CatalogPages:
    """The pages that the catalog has in one segment; arrays of shape (n,), `namespace` (n, 16), in slot order."""

    slot: I64
    index: U64
    tag: U64
    checksum: U64
    payload_bytes: npt.NDArray[np.uint32]
    generation: U64
    namespace: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.slot)

    def locations(self, segment_id: int, at: Mask) -> Locations:
        """Those of the pages, as the catalog's other calls take them."""
        slot = self.slot[at].astype(np.uint32)
        segment = np.full(len(slot), segment_id, np.uint32)
        found = np.ones(len(slot), np.bool_)
        return Locations(found, segment, slot, self.generation[at], self.checksum[at], self.payload_bytes[at])


def catalog_pages(catalog: Catalog, txn: Any, segment_id: int) -> CatalogPages:
    """All pages that the catalog has in a segment. Walks the segment's extents: for tools, not for hot paths."""
    slots, idents, items = [np.zeros(0, np.int64)], [np.zeros(0, IDENT)], [np.zeros(0, ITEM)]
    generations, namespaces = [np.zeros(0, np.uint64)], [np.zeros((0, 16), np.uint8)]
    for key, value in catalog.extents(txn, segment_id):
        _, first = EXTENT_KEY.unpack(key)
        extent = Extent.decode(value)
        live = np.flatnonzero(extent.items["live"])
        slots.append(first + live)
        idents.append(extent.idents[live])
        items.append(extent.items[live])
        generations.append(np.full(len(live), extent.generation, np.uint64))
        namespaces.append(np.tile(np.frombuffer(extent.namespace, np.uint8), (len(live), 1)))
    ident, item = np.concatenate(idents), np.concatenate(items)
    return CatalogPages(
        np.concatenate(slots),
        ident["index"].astype(np.uint64),
        ident["tag"].astype(np.uint64),
        item["checksum"].astype(np.uint64),
        item["payload_bytes"].astype(np.uint32),
        np.concatenate(generations),
        np.concatenate(namespaces),
    )


def namespaces_of(entries: Entries) -> tuple[list[bytes], npt.NDArray[np.intp]]:
    """The distinct namespace digests of n entries, and for each entry which of them it has."""
    packed = np.ascontiguousarray(entries["namespace"]).view("V16").reshape(-1)
    digests, which = np.unique(packed, return_inverse=True)
    return [digest.tobytes() for digest in digests], which.reshape(-1)


def disagreements(table: Table, pages: CatalogPages, segment_id: int) -> list[Damage]:
    """Pages that the catalog has and the table does not tell in the same way, and entries that are damaged.

    Entries that the catalog does not have are no damage: pages that were dropped, or never committed.
    """
    count = len(table.entries)
    inside = pages.slot < count
    slot = np.where(inside, pages.slot, 0)
    entries = table.entries[slot]
    live = inside & table.live[slot]
    same = live & (entries["checksum"] == pages.checksum) & (entries["generation"] == pages.generation)
    same &= entries["payload_bytes"] == pages.payload_bytes
    same[same] = _same_page(entries[same], pages, same)
    found = []
    for at in np.flatnonzero(~same).tolist():  # few: each is damage
        what = _what(table, int(pages.slot[at]), live=bool(live[at]), inside=bool(inside[at]))
        found.append(_entry_damage(table, segment_id, int(pages.slot[at]), what, pages=1))
    told = np.zeros(count, np.bool_)
    told[slot[inside]] = True
    for at in np.flatnonzero(table.damaged & ~told).tolist():
        found.append(_entry_damage(table, segment_id, at, "the table entry is damaged", pages=0))
    return found


def _same_page(entries: Entries, pages: CatalogPages, at: Mask) -> Mask:
    """Whether entries are of the very pages that the catalog means: key and namespace."""
    same: Mask = (entries["namespace"] == pages.namespace[at]).all(axis=1)
    digests, which = namespaces_of(entries)
    for number, digest in enumerate(digests):
        mine = np.flatnonzero(which == number)
        index, tag = index_keys(np.ascontiguousarray(entries["key"][mine]), digest)
        same[mine] &= (index == pages.index[at][mine]) & (tag == pages.tag[at][mine])
    return same


def _what(table: Table, slot: int, *, live: bool, inside: bool) -> str:
    if not inside:
        return "the catalog has a page in a slot that the segment does not have"
    if live:
        return "the table entry says something else than the catalog"
    if table.damaged[slot]:
        return "the table entry is damaged"
    if table.valid[slot] and table.entries["flags"][slot] & FLAG_DELETED:
        return "the table entry says deleted, the catalog does not"
    return "the catalog has a page that the table lacks"


def _entry_damage(table: Table, segment_id: int, slot: int, what: str, pages: int) -> Damage:
    return Damage(table.file, segment_id, Kind.ENTRY, what, slot, table.key(slot), pages)

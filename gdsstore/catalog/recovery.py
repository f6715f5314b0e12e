"""Rebuilding the catalog from what lies on the volumes: superblocks and record tables."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.copies import Arrived, choose, forget
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.items import page_items
from gdsstore.catalog.keys import U64, index_keys
from gdsstore.catalog.records import EXTENT_PAGES, Run, SegmentRow, SegmentState
from gdsstore.errors import GdsStoreError
from gdsstore.volume.format import FLAG_DELETED, FLAG_STORED, Entries, Superblock, entry_salt, intact
from gdsstore.volume.volume import Volume, read_entries

log = logging.getLogger("gdsstore.catalog")

BATCH_PAGES = 50_000  # bounds what one LMDB transaction copies


@dataclass(slots=True)
class Found:
    """What a segment's table holds: only entries that are whole and of the segment's present generation."""

    row: SegmentRow
    entries: Entries | None = None
    problem: str = ""


@dataclass(slots=True)
class Recovered:
    """The outcome of a rebuild."""

    segments: int = 0
    pages: int = 0
    last_sequence: int = 0  # the largest of all entries, tombstones too
    problems: list[str] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)  # ids of segments that cannot be used


def scan_segment(volume: Volume, segment_id: int, store_uuid: bytes, segment_bytes: int) -> Found:
    """Read one segment's superblock and table. A segment that cannot be used comes back as LOST, with the reason."""
    try:
        superblock = volume.read_superblock(segment_id)
        if superblock.store_uuid != store_uuid:
            raise GdsStoreError(
                "the segment belongs to another store", path=str(volume.segment_path(segment_id))
            )
        if superblock.geometry.segment_bytes != segment_bytes:  # it also says how large a table is to be read
            raise GdsStoreError(
                f"the superblock says {superblock.geometry.segment_bytes} bytes a segment, the store {segment_bytes}",
                path=str(volume.segment_path(segment_id)),
            )
        with volume.table(segment_id) as fd:
            os.posix_fadvise(fd, 0, superblock.geometry.data_offset, os.POSIX_FADV_WILLNEED)
            entries = read_entries(fd, superblock.geometry)
    except GdsStoreError as error:
        return Found(SegmentRow(segment_id, volume.index, SegmentState.LOST, 0, 0, 0, 0), problem=str(error))
    entries = _valid(entries, superblock)
    filled = int(entries["slot"].max()) + 1 if len(entries) else 0
    state = SegmentState.FREE if filled == 0 else SegmentState.OPEN
    if filled == superblock.geometry.slot_count:
        state = SegmentState.SEALED
    geometry = superblock.geometry
    row = SegmentRow(
        segment_id,
        volume.index,
        state,
        geometry.slot_bytes,
        geometry.slot_count,
        superblock.generation,
        filled,
    )
    return Found(row, entries)


def _valid(entries: Entries, superblock: Superblock) -> Entries:
    good = intact(entries, entry_salt(superblock.store_uuid))
    good &= entries["generation"] == superblock.generation
    good &= entries["segment_id"] == superblock.segment_id
    good &= entries["slot"] == np.arange(len(entries))
    good &= entries["payload_bytes"] <= superblock.geometry.slot_bytes
    return entries[good]


def rebuild(
    catalog: Catalog,
    volumes: Sequence[Volume],
    store_uuid: bytes,
    segment_bytes: int,
    cleared: dict[bytes, int],
    arrived: Arrived,
) -> Recovered:
    """Fill an empty catalog. `cleared`: for a namespace digest, the sequence up to which its pages were cleared. `arrived`: says
    which copies of a page are whole, where there are several."""
    result = Recovered()
    scans = [
        scan_segment(volume, segment_id, store_uuid, segment_bytes)
        for volume in volumes
        for segment_id in sorted(volume.segment_ids())
    ]
    _put_rows(catalog, scans, result)
    tables = [found.entries for found in scans if found.entries is not None and len(found.entries)]
    if tables:
        result.last_sequence = max(int(entries["sequence"].max()) for entries in tables)
        result.pages, torn = _put_pages(catalog, np.concatenate(tables), cleared, arrived)
        forget(
            volumes,
            {found.row.segment_id: found.row.volume for found in scans if found.entries is not None},
            torn,
        )
    return result


def _put_rows(catalog: Catalog, scans: Sequence[Found], result: Recovered) -> None:
    with catalog.write() as txn:
        for found in sorted(scans, key=lambda found: bool(found.problem)):  # what is a segment goes first
            if catalog.segment(txn, found.row.segment_id) is not None:
                result.problems.append(
                    f"segment {found.row.segment_id} exists on two volumes; the second is left out"
                )
                found.entries = None
                continue
            if found.problem:
                result.problems.append(found.problem)
                result.left_out.append(found.row.segment_id)
                log.warning("segment left out: %s", found.problem)
            catalog.put_segment(txn, found.row)
            result.segments += 1
        if scans:
            catalog.next_segment_id(txn, max(found.row.segment_id for found in scans))


def _put_pages(
    catalog: Catalog, entries: Entries, cleared: dict[bytes, int], arrived: Arrived
) -> tuple[int, Entries]:
    """Choose one entry of every page, and write extents and pages in key order. How many there are, and the entries of copies
    that are not whole."""
    digests, which = _namespaces(entries)
    index = np.empty(len(entries), np.uint64)
    tag = np.empty(len(entries), np.uint64)
    live = (entries["flags"] & (FLAG_STORED | FLAG_DELETED)) == FLAG_STORED
    for number, digest in enumerate(digests):
        mine = np.flatnonzero(which == number)
        index[mine], tag[mine] = index_keys(np.ascontiguousarray(entries["key"][mine]), digest)
        live[mine] &= entries["sequence"][mine] > cleared.get(digest, 0)
    chosen, torn = choose(entries, index, live, arrived)
    if len(chosen) == 0:
        return 0, entries[torn]
    keep = np.zeros(len(entries), np.bool_)
    keep[chosen] = True
    first = _put_extents(catalog, entries, index, tag, which, digests, keep)
    for start in range(0, len(chosen), BATCH_PAGES):
        part = chosen[start : start + BATCH_PAGES]
        items = page_items(
            index[part], tag[part], entries["segment_id"][part], entries["slot"][part], first[part]
        )
        with catalog.write(pages=len(part)) as txn:
            catalog.append_sorted(txn, items)
    return len(chosen), entries[torn]


def _namespaces(entries: Entries) -> tuple[list[bytes], np.ndarray[tuple[int], np.dtype[np.intp]]]:
    packed = np.ascontiguousarray(entries["namespace"]).view("V16").reshape(-1)
    digests, which = np.unique(packed, return_inverse=True)
    return [digest.tobytes() for digest in digests], which


def _put_extents(
    catalog: Catalog, entries: Entries, index: U64, tag: U64, which: Any, digests: list[bytes], keep: Any
) -> npt.NDArray[np.uint32]:
    """Write the kept pages as extents; returns the first slot of each page's extent, shape (n,)."""
    first = np.zeros(len(entries), np.uint32)
    kept = np.flatnonzero(keep)  # in segment and slot order, as the tables were read
    segment, slot = entries["segment_id"][kept], entries["slot"][kept].astype(np.int64)
    breaks = np.flatnonzero((np.diff(segment) != 0) | (np.diff(slot) != 1) | (np.diff(which[kept]) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(kept)]
    pending: list[tuple[bytes, Run]] = []
    for start, stop in pairwise(bounds):
        part = kept[start:stop]
        run = Run(
            int(segment[start]),
            int(slot[start]),
            int(entries["generation"][part[0]]),
            index[part],
            tag[part],
            entries["checksum"][part],
            entries["payload_bytes"][part],
        )
        first[part] = slot[start] + (slot[start:stop] - slot[start]) // EXTENT_PAGES * EXTENT_PAGES
        pending.append((digests[int(which[part[0]])], run))
    _flush_extents(catalog, pending)
    return first


def _flush_extents(catalog: Catalog, pending: Sequence[tuple[bytes, Run]]) -> None:
    at = 0
    while at < len(pending):
        pages = 0
        with catalog.write(pages=BATCH_PAGES) as txn:
            while at < len(pending) and pages < BATCH_PAGES:
                catalog.put_extents(txn, *pending[at])
                pages += len(pending[at][1])
                at += 1

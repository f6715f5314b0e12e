"""Dropping what is damaged: its pages become misses, and no rebuild brings them back.

All calls are made inside the catalog's write transaction in which the damage was confirmed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gdsstore.catalog.index import Catalog
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.verify.agreement import CatalogPages
from gdsstore.verify.result import Damage
from gdsstore.verify.table import Table
from gdsstore.volume.format import ENTRY
from gdsstore.volume.tombstones import bury
from gdsstore.volume.volume import Volume, write_entries


def repair_segment(
    catalog: Catalog, txn: Any, segment_id: int, volume: Volume, damage: Sequence[Damage]
) -> list[Damage]:
    """Drop all pages of a damaged segment. Its file is never used again, and stays: it may be another store's. One without a
    file is forgotten."""
    if all(each.unsure for each in damage):
        return list(damage)
    dropped = catalog.drop_pages(txn, segment_id)
    # Generation 0, as for a segment that a rebuild leaves out: a process that is filling this one cannot commit to it then.
    if os.path.lexists(volume.segment_path(segment_id)):
        catalog.put_segment(txn, SegmentRow(segment_id, volume.index, SegmentState.LOST, 0, 0, 0, 0))
    else:
        catalog.forget_segment(txn, segment_id)
    return [replace(each, pages=dropped, repaired=True) for each in damage]


def repair_pages(
    catalog: Catalog,
    txn: Any,
    volume: Volume,
    table: Table,
    pages: CatalogPages,
    filled: int,
    damage: Sequence[Damage],
) -> list[Damage]:
    """Drop single pages from catalog and table. What stays unrepaired: pages that could not be looked at for a reason
    that may pass, and entries in slots from `filled` on of a segment that another process is filling.

    Raises VolumeError where the table cannot be written.
    """
    segment_id, generation = table.superblock.segment_id, table.superblock.generation
    bad = {each.slot: each for each in damage if each.slot is not None and not each.unsure}
    slots = np.array(sorted(bad), np.int64)
    known = np.isin(pages.slot, slots)
    removed = catalog.remove(txn, pages.locations(segment_id, known), pages.index[known])
    kept = set(pages.slot[known][~removed].tolist())

    entries = slots[slots < len(table.entries)]
    torn = entries[table.damaged[entries]]
    whole = entries[table.live[entries]].astype(np.uint32)
    bury(
        volume,
        segment_id,
        table.superblock.geometry,
        generation,
        whole,
        table.superblock.store_uuid,
        time.time_ns(),
    )
    kept |= _empty(volume, segment_id, torn.tolist(), filled)
    return [replace(each, repaired=each.slot in bad and each.slot not in kept) for each in damage]


def _empty(volume: Volume, segment_id: int, slots: Sequence[int], filled: int) -> set[int]:
    """Make the entries of these slots empty. Returns those that were left as they are."""
    left: set[int] = set()
    with volume.table(segment_id) as fd, contextlib.ExitStack() as undo:
        if any(slot >= filled for slot in slots):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                undo.callback(fcntl.flock, fd, fcntl.LOCK_UN)
            except BlockingIOError:  # somebody fills it, and writes these entries anew
                left = {slot for slot in slots if slot >= filled}
        for slot in slots:
            if slot not in left:
                write_entries(fd, slot, np.zeros(1, ENTRY))
        os.fdatasync(fd)
    return left

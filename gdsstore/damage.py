"""What a store does about pages that turned out to be damaged, and segments whose files are gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.lost import NO_FILE, give_up
from gdsstore.catalog.records import SegmentState
from gdsstore.volume.volume import Volume

if TYPE_CHECKING:
    from gdsstore.store_core import StoreCore

log = logging.getLogger("gdsstore.store")


def report_damage(store: StoreCore, segment: npt.NDArray[np.uint32], slot: npt.NDArray[np.uint32]) -> None:
    """Log and count damaged pages, naming their files."""
    store.counters.add("damaged_pages", len(segment))
    for segment_id in np.unique(segment).tolist():
        slots = slot[segment == segment_id].tolist()
        name = f"{segment_id:08d}.seg"
        log.error("segment %s: %d damaged pages, dropped; slots %s", name, len(slots), slots[:16])


def drop_lost_segments(store: StoreCore, segment_ids: Sequence[int]) -> set[int]:
    """After failed reads: forget the pages of segments whose files are gone, cut short, or of another store. Which these are."""
    lost = set()
    for segment_id in segment_ids:
        with store.catalog.read() as txn:
            row = store.catalog.segment(txn, segment_id)
        if row is None or row.state is SegmentState.LOST:
            continue
        volume = store.volumes[row.volume]
        why = _lost(store, volume, segment_id)
        if why:
            log.error("%s is %s; its pages are dropped", volume.segment_path(segment_id), why)
            give_up(store.catalog, volume, row)
            lost.add(segment_id)
    return lost


def _lost(store: StoreCore, volume: Volume, segment_id: int) -> str:
    """Why a segment's pages will not come back; "" where they may."""
    try:
        size = os.lstat(volume.segment_path(segment_id)).st_size
    except OSError as error:
        return "missing" if error.errno in NO_FILE else ""
    if size < store.segment_bytes:
        return "cut short"
    return "another segment now" if volume.holds_another(segment_id, store.uuid) else ""

"""What a store does about pages that turned out to be damaged, and segments whose files are gone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.lost import give_up
from gdsstore.catalog.records import SegmentState

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


def drop_lost_segments(store: StoreCore, segment_ids: Sequence[int]) -> None:
    """After failed reads: forget the pages of segments whose files are gone or cut short."""
    for segment_id in segment_ids:
        with store.catalog.read() as txn:
            row = store.catalog.segment(txn, segment_id)
        if row is None or row.state is SegmentState.LOST:
            continue
        path = store.volumes[row.volume].segment_path(segment_id)
        with contextlib.suppress(OSError):
            if os.lstat(path).st_size >= store.segment_bytes:
                continue
        log.error("%s is missing or cut short; its pages are dropped", path)
        give_up(store.catalog, store.volumes[row.volume], row)

"""Keeping the store within its capacity: whole segments, the coldest first."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gdsstore.catalog.heat import Heat
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.lost import give_up, is_lost
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.volume.volume import Volume

log = logging.getLogger("gdsstore.catalog")

CATALOG_SHARE = 1 / 64  # of the capacity, until the catalog is known to be larger


class Ready(NamedTuple):
    free: list[int]  # segments of each volume
    may_grow: bool  # the capacity has room for a new one


@dataclass(slots=True)
class ReclaimCounts:
    segments: int = 0
    pages: int = 0
    nbytes: int = 0  # of those pages' records


def coldness(ages_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """How cold a segment is, from the ages of its slots: that of its hottest quarter's coldest.

    On the conversation trace this came nearest to a page LRU (22.8 of 23.5 %; by median 22.2, by the hottest slot 21.1).
    """
    if len(ages_s) == 0:
        return float("inf")
    quarter = len(ages_s) // 4
    return float(np.partition(ages_s, quarter)[quarter])


class Reclaimer:
    """Reclaims segments of one store. Any process may: the write transaction and the segment's lock order them."""

    def __init__(
        self,
        catalog: Catalog,
        volumes: Sequence[Volume],
        heat: Heat,
        segment_bytes: int,
        capacity_bytes: int,
        grace_s: float,
        store_uuid: bytes,
    ) -> None:
        self._catalog, self._volumes, self._heat = catalog, volumes, heat
        self._segment_bytes, self.capacity_bytes, self._grace_s = segment_bytes, capacity_bytes, grace_s
        self._uuid = store_uuid
        self.counts = ReclaimCounts()

    def max_segments(self) -> int:
        """How many segments the capacity holds beside the catalog and the heat file. Physical bytes."""
        aside = max(
            self._catalog.physical_bytes + self._heat.used_bytes, int(self.capacity_bytes * CATALOG_SHARE)
        )
        return max(1, (self.capacity_bytes - aside) // self._segment_bytes)

    def reclaim_one(self) -> SegmentRow | None:
        """Drop the coldest segment's pages and return it as free; None where every one is in use or within the grace."""
        with self._catalog.read() as txn:
            rows = self._catalog.segments(txn)
        candidates = [
            (coldness(self._heat.ages(row.segment_id, row.filled)), row)
            for row in rows
            if row.state in (SegmentState.SEALED, SegmentState.OPEN)
            and not self._heat.protected(row.segment_id, self._grace_s)
        ]
        # Full ones first: a partly filled one without an owner still takes pages.
        for _, row in sorted(candidates, key=lambda pair: (pair[1].state is SegmentState.OPEN, -pair[0])):
            freed = self._free(row)
            if freed is not None:
                return freed
        return None

    def _free(self, row: SegmentRow) -> SegmentRow | None:
        with self._locked(row) as locked:
            return self._drop(row) if locked else None

    @contextlib.contextmanager
    def _locked(self, row: SegmentRow) -> Iterator[bool]:
        """Hold a segment's lock for the length of a `with`. False where somebody else has it, or its file is not usable."""
        with contextlib.ExitStack() as stack:
            locked = False
            try:
                fd = self._volumes[row.volume].open_table(row.segment_id)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                pass  # somebody fills it
            except OSError as error:
                log.error("segment %d cannot be reclaimed: %s", row.segment_id, error)
                if is_lost(error):
                    give_up(self._catalog, self._volumes[row.volume], row)
            yield locked

    def _drop(self, row: SegmentRow) -> SegmentRow | None:
        with self._catalog.write(pages=row.filled) as txn:
            now = self._catalog.segment(txn, row.segment_id)
            if now is None or (now.generation, now.state) != (row.generation, row.state):
                return None
            if self._heat.protected(row.segment_id, self._grace_s):
                return None
            dropped = self._catalog.drop_pages(txn, row.segment_id)
            freed = now.with_(state=SegmentState.FREE, filled=0)
            self._catalog.put_segment(txn, freed)
        self.counts.segments += 1
        self.counts.pages += dropped
        self.counts.nbytes += dropped * row.slot_bytes
        return freed

    def shrink(self) -> bool:
        """Remove one segment where there are more than the capacity holds. Whether one was removed."""
        with self._catalog.read() as txn:
            rows = self._catalog.segments(txn)
        if len(rows) <= self.max_segments():
            return False
        free = next((row for row in rows if row.state is SegmentState.FREE), None) or self.reclaim_one()
        if free is None:
            return False
        with self._locked(free) as locked:
            if not locked:
                return False
            if self._volumes[free.volume].holds_another(free.segment_id, self._uuid):
                log.error("segment %d is another store's now; it is left alone", free.segment_id)
                give_up(self._catalog, self._volumes[free.volume], free)
                return False
            with self._catalog.write() as txn:
                now = self._catalog.segment(txn, free.segment_id)
                if now is None or now.state is not SegmentState.FREE:
                    return False
                self._catalog.forget_segment(txn, free.segment_id)
                self._volumes[free.volume].remove_segment(free.segment_id)
        return True

    def ready(self) -> Ready:
        """What stands ready for the next writer."""
        with self._catalog.read() as txn:
            rows = self._catalog.segments(txn)
        free = [row.volume for row in rows if row.state is SegmentState.FREE]
        return Ready([free.count(volume.index) for volume in self._volumes], len(rows) < self.max_segments())

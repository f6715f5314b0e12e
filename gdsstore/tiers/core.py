"""The state of a host cache, and the lock that guards it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from gdsstore.errors import StoreClosedError
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import I32
from gdsstore.tiers.shelf import Shelf
from gdsstore.tiers.stats import CacheStats, Tally

log = logging.getLogger("gdsstore.tiers")


class Core:
    """Regions, the shelves that they are on, and what cannot be reused yet. All calls: with `lock` held."""

    def __init__(self, address: int, region_bytes: int, regions: int) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # pins went, or records were written
        self.region_bytes = region_bytes
        self.regions = regions
        self.shelves: dict[int, Shelf] = {}  # by record_bytes
        self.tally = Tally()
        self.closed = False
        self.drops: Counter[int] = Counter()  # by namespace number: calls that dropped something
        self.writing: list[tuple[Shelf, I32]] = []  # rows of batches that a writer has
        self.address = address
        self.lent: Counter[str] = Counter()  # bytes of records that other processes read, by who does
        self._free_regions = list(range(regions - 1, -1, -1))
        self._clock = 0
        self._stuck: list[tuple[Shelf, I32, Callable[[], bool]]] = []
        self._sweeping = False

    def check_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the host cache was closed")

    def stamp(self) -> int:
        """The number of a new call."""
        self._clock += 1
        return self._clock

    def shelf(self, record_bytes: int) -> Shelf:
        shelf = self.shelves.get(record_bytes)
        if shelf is None:
            shelf = Shelf(record_bytes, self.address, self.region_bytes, self.regions)
            self.shelves[record_bytes] = shelf
        return shelf

    # --- regions ---

    def add_free_region(self, shelf: Shelf) -> bool:
        """Give the shelf a region that nobody has; whether there was one."""
        if not self._free_regions:
            return False
        shelf.add_region(self._free_regions.pop())
        return True

    def move_region(self, region: int, source: Shelf, destination: Shelf) -> None:
        """Of a region without rows in use."""
        source.give_region(region)
        destination.add_region(region)
        self.tally.regions_moved += 1

    def evict(self, shelf: Shelf, picked: I32) -> None:
        """Drop ready rows without pins that need not be written."""
        gone = shelf.rows[picked]
        self.tally.evictions += len(picked)
        self.tally.trials_dropped += int(np.count_nonzero(gone["standing"] == Standing.TRIAL))
        self.tally.left_unused(gone)
        shelf.remove(picked)

    # --- transfers that hung ---

    def quarantine(self, shelf: Shelf, picked: I32, done: Callable[[], bool]) -> None:
        """Keep one pin of these rows until `done()` is true."""
        if len(picked):
            self._stuck.append((shelf, picked, done))

    @property
    def quarantined(self) -> int:
        return sum(len(picked) for _, picked, _ in self._stuck)

    def sweep(self) -> bool:
        """Take the pins of transfers that have ended; whether there were some.

        Gives up the lock meanwhile: `done` is foreign code, and may take locks.
        """
        if self._sweeping or not self._stuck:
            return False
        self._sweeping = True
        candidates = list(self._stuck)
        ended: list[bool] = []
        self.lock.release()
        try:
            ended = [_is_done(done) for _, _, done in candidates]
        finally:
            self.lock.acquire()
            self._sweeping = False
            over = {id(entry) for entry, is_over in zip(candidates, ended, strict=False) if is_over}
            self._stuck = [entry for entry in self._stuck if id(entry) not in over]
            for shelf, picked, _ in (entry for entry in candidates if id(entry) in over):
                shelf.unpin(picked)
            if over:
                self.changed.notify_all()
        return bool(over)

    # --- totals ---

    @property
    def pins(self) -> int:
        return sum(shelf.pins for shelf in self.shelves.values())

    @property
    def dirty(self) -> int:
        return sum(shelf.dirty for shelf in self.shelves.values())

    def stats(self) -> CacheStats:
        shelves, tally = self.shelves.values(), self.tally
        prefetched, loaded, saved = tally.inserted.tolist()
        prefetched_unused, loaded_unused, saved_unused = tally.unused.tolist()
        return CacheStats(
            size_bytes=self.regions * self.region_bytes,
            resident_records=sum(shelf.ready for shelf in shelves),
            resident_bytes=sum(shelf.ready * shelf.record_bytes for shelf in shelves),
            dirty_records=self.dirty,
            dirty_bytes=sum(shelf.dirty * shelf.record_bytes for shelf in shelves),
            pins=self.pins,
            quarantined_records=self.quarantined,
            lent_bytes=self.lent.total(),
            hits=tally.hits,
            misses=tally.misses,
            lent=tally.lent,
            not_lent=tally.not_lent,
            evictions=tally.evictions,
            dropped=tally.dropped,
            no_room=tally.no_room,
            written_back=tally.written_back,
            write_failures=tally.write_failures,
            dirty_lost=tally.dirty_lost,
            damaged=tally.damaged,
            trials_dropped=tally.trials_dropped,
            regions_moved=tally.regions_moved,
            inserted_prefetch=prefetched,
            inserted_load=loaded,
            inserted_save=saved,
            unused_prefetch=prefetched_unused,
            unused_load=loaded_unused,
            unused_save=saved_unused,
        )


def _is_done(done: Callable[[], bool]) -> bool:
    try:
        return bool(done())
    except Exception:  # whoever needs room is not the one to fail for another's transfer
        log.exception("the state of a quarantined transfer cannot be told; its records' memory stays unused")
        return False

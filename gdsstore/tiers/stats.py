"""What a host cache counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gdsstore.tiers.rows import I64, Mask, Origin, Rows


@dataclass(slots=True)
class Tally:
    """Events since the cache was opened. Written with the cache's lock held."""

    hits: int = 0
    misses: int = 0
    lent: int = 0
    not_lent: int = 0
    evictions: int = 0
    dropped: int = 0  # on a caller's word
    no_room: int = 0
    written_back: int = 0
    write_failures: int = 0
    dirty_lost: int = 0
    damaged: int = 0
    trials_dropped: int = 0
    regions_moved: int = 0
    inserted: I64 = field(default_factory=lambda: np.zeros(len(Origin), np.int64))
    unused: I64 = field(default_factory=lambda: np.zeros(len(Origin), np.int64))

    def entered(self, origin: Origin, count: int) -> None:
        self.inserted[origin] += count

    def left_unused(self, gone: Rows) -> None:
        """Count by origin those of the rows that left without ever having been hit."""
        never: Mask = ~gone["hit"]
        self.unused += np.bincount(gone["origin"][never], minlength=len(Origin))


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A host cache at one moment. The first group is now, the rest counts records since it was opened."""

    size_bytes: int
    resident_records: int
    resident_bytes: int
    dirty_records: int
    dirty_bytes: int
    pins: int  # of readers, writers, reservations and transfers that hung
    quarantined_records: int  # of these, records that a transfer that hung may still touch
    lent_bytes: int  # that other processes read now; a record that is lent twice counts twice

    hits: int
    misses: int
    lent: int  # to other processes; they count as hits too
    not_lent: int  # because too much was lent already
    evictions: int
    dropped: int  # by `drop` and `clear`
    no_room: int  # keys for which a reservation found no room
    written_back: int
    write_failures: int  # each is tried once more, later
    dirty_lost: int  # dirty records that are gone, or were left at close, without having been written
    damaged: int  # records that had changed before they were written; they were dropped
    trials_dropped: int  # records on trial that were evicted before a second use
    regions_moved: int  # from one record size to another
    inserted_prefetch: int
    inserted_load: int
    inserted_save: int
    unused_prefetch: int  # evicted without a hit
    unused_load: int
    unused_save: int

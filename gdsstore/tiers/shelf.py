"""All records of one size in the host cache: which rows hold which keys, in what order they were used, and which are free."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gdsstore.tiers import kernels
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import I32, ROW, U8, U64, Mask, Origin, State


class Wanted(NamedTuple):
    """n keys of one namespace. `words`: uint64 (n, 4); `hashes`: catalog.keys' index, uint64 (n,)."""

    words: U64
    hashes: U64
    namespace: int

    def take(self, index: Mask) -> Wanted:
        return Wanted(self.words[index], self.hashes[index], self.namespace)


class Shelf:
    """Row r is slot `r % per_region` of region `r // per_region`. All calls: with the cache's lock held.

    The arrays are as long as if all regions were here. They are zero pages until used, so that what is not here costs nothing.
    """

    def __init__(self, record_bytes: int, address: int, region_bytes: int, regions: int) -> None:
        self.record_bytes = record_bytes
        self.per_region = region_bytes // record_bytes  # 0: records of this size do not fit
        self._address, self._region_bytes = address, region_bytes
        slots = self.per_region * regions
        self.rows = np.zeros(slots, ROW)
        self._table = np.zeros(1 << (2 * slots + 2).bit_length(), np.int32)
        self._ends = np.full(2, -1, np.int32)
        self._free = np.zeros(slots, np.int32)
        self.free_count = 0
        self.owned = np.zeros(regions, np.bool_)
        self._region_used = np.zeros(regions, np.int32)
        self._region_stamp = np.zeros(regions, np.int64)
        self.ready = self.dirty = self.pins = 0

    def address_of(self, picked: I32) -> U64:
        """Memory addresses of rows; 0 for row -1."""
        if self.per_region == 0:
            return np.zeros(len(picked), np.uint64)
        region, slot = np.divmod(picked.astype(np.int64), self.per_region)
        address = self._address + region * self._region_bytes + slot * self.record_bytes
        return np.where(picked >= 0, address, 0).astype(np.uint64)

    def find(self, wanted: Wanted) -> I32:
        """The row of each key, ready or filling, or -1."""
        picked = np.empty(len(wanted.hashes), np.int32)
        kernels.find(self._table, self.rows, wanted.words, wanted.hashes, wanted.namespace, picked)
        return picked

    def find_ready(self, wanted: Wanted, stamp: int) -> tuple[I32, int]:
        """The row of each key that a reader may see, or -1, and how many there are. Makes them the hottest."""
        picked = self.find(wanted)
        ready = kernels.keep_ready(self.rows, picked)
        if ready:
            self.touch(picked, stamp)
        return picked, ready

    def touch(self, picked: I32, stamp: int) -> None:
        kernels.touch(self.rows, self._ends, self._region_stamp, max(self.per_region, 1), picked, stamp)

    def hit(self, picked: I32, ready: int) -> U8:
        """Pin ready rows for a reader. Returns a 1 for each that was on trial and is dirty now."""
        due = np.zeros(len(picked), np.uint8)
        self.dirty += kernels.hit(self.rows, picked, due)
        self.pins += ready
        return due

    def claim(self, wanted: Wanted, payload_bytes: int, origin: Origin) -> tuple[U8, I32]:
        """Rows for keys that are in neither state, as far as there are free ones. Returns `Room` values and rows."""
        room = np.zeros(len(wanted.hashes), np.uint8)
        picked = np.full(len(wanted.hashes), -1, np.int32)
        before = self.free_count
        self.free_count = kernels.claim(
            self._table,
            self.rows,
            self._region_used,
            max(self.per_region, 1),
            self._free,
            before,
            wanted.words,
            wanted.hashes,
            wanted.namespace,
            payload_bytes,
            int(origin),
            room,
            picked,
        )
        self.pins += before - self.free_count
        return room, picked

    def publish(self, picked: I32, raw: U64, standing: Standing, stamp: int) -> Mask:
        """Let readers see claimed rows; the claim's pins go. Returns which: not those that were dropped meanwhile."""
        visible = np.zeros(len(picked), np.uint8)
        count = kernels.publish(
            self.rows,
            self._ends,
            self._region_stamp,
            max(self.per_region, 1),
            picked,
            raw,
            int(standing),
            stamp,
            visible,
        )
        self.ready += count
        self.pins -= count
        self.dirty += count if standing is Standing.DIRTY else 0
        return visible.astype(np.bool_)

    def set_standing(self, picked: I32, standing: Standing) -> None:
        """Of different ready rows."""
        was_dirty = int(np.count_nonzero(self.rows["standing"][picked] == Standing.DIRTY))
        self.dirty += (len(picked) if standing is Standing.DIRTY else 0) - was_dirty
        self.rows["standing"][picked] = standing

    def remove(self, picked: I32) -> None:
        """Nobody finds these ready or filling rows, all different, any more; they are free now or with their last pin."""
        picked = np.sort(picked)  # see kernels.free_doomed
        ready = self.rows["state"][picked] == State.READY
        self.ready -= int(np.count_nonzero(ready))
        self.dirty -= int(np.count_nonzero(ready & (self.rows["standing"][picked] == Standing.DIRTY)))
        kernels.detach(self._table, self.rows, self._ends, picked)
        self._free_doomed(picked)

    def pin(self, picked: I32) -> None:
        """Of different rows."""
        self.rows["pins"][picked] += 1
        self.pins += len(picked)

    def pin_each(self, picked: I32) -> None:
        """A row that comes twice gets two pins."""
        np.add.at(self.rows["pins"], picked, 1)
        self.pins += len(picked)

    def unpin(self, picked: I32) -> None:
        """A row that comes twice loses two pins."""
        kernels.unpin(self.rows, picked)
        self.pins -= len(picked)
        self._free_doomed(picked)

    def _free_doomed(self, picked: I32) -> None:
        self.free_count = kernels.free_doomed(
            self.rows, self._region_used, max(self.per_region, 1), self._free, self.free_count, picked
        )

    # --- what to evict, and what to write ---

    def coldest(self, want: int) -> I32:
        """At most `want` ready rows without pins, coldest first."""
        out = np.empty(want, np.int32)
        return out[: kernels.coldest(self.rows, self._ends, want, out)]

    def coldest_dirty(self, want: int, steps: int) -> I32:
        """At most `want` dirty rows that nobody writes, among the `steps` coldest."""
        out = np.empty(want, np.int32)
        return out[: kernels.coldest_dirty(self.rows, self._ends, want, steps, out)]

    def all_dirty(self) -> I32:
        """All dirty rows that nobody writes, coldest first."""
        return self.coldest_dirty(self.dirty, self.ready)

    def unwritten(self, picked: I32) -> I32:
        """Those of `picked` that are still to be written, and that nobody writes."""
        at = self.rows[picked]
        still = (at["state"] == State.READY) & (at["standing"] == Standing.DIRTY) & ~at["writing"]
        unwritten: I32 = picked[still]
        return unwritten

    def of_namespace(self, namespace: int) -> I32:
        """All ready and filling rows of a namespace. Looks at every row."""
        state = self.rows["state"]
        mine = (self.rows["namespace"] == namespace) & ((state == State.READY) | (state == State.FILLING))
        return np.flatnonzero(mine).astype(np.int32)

    # --- regions ---

    def add_region(self, region: int) -> None:
        first = region * self.per_region
        self.owned[region] = True
        self._region_stamp[region] = 0
        stop = self.free_count + self.per_region
        self._free[self.free_count : stop] = np.arange(first + self.per_region - 1, first - 1, -1)
        self.free_count = stop

    def give_region(self, region: int) -> None:
        """Let go of a region that has no row in use."""
        free = self._free[: self.free_count]
        kept = free[free // self.per_region != region]
        self._free[: len(kept)] = kept
        self.free_count = len(kept)
        self.owned[region] = False

    def region_stamps(self) -> tuple[I32, U64]:
        """This shelf's regions, and the last call that used a record of each, 0 for an empty one."""
        mine = np.flatnonzero(self.owned)
        stamps = np.where(self._region_used[mine] > 0, self._region_stamp[mine], 0)
        return mine.astype(np.int32), stamps.astype(np.uint64)

    def region_rows(self, region: int) -> I32:
        """The rows in use of a region."""
        first = region * self.per_region
        states = self.rows["state"][first : first + self.per_region]
        return (np.flatnonzero(states != State.FREE) + first).astype(np.int32)

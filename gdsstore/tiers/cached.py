"""A namespace of the host cache: the calls that find, bring and drop its records. Each takes n keys at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gdsstore.catalog.keys import index_keys
from gdsstore.checksum.host import raw_sums
from gdsstore.errors import ArgumentError, DeadlineError
from gdsstore.memory.copying import copy_ranges, zero_ranges
from gdsstore.memory.views import PageMemory, checked
from gdsstore.namespace import Keys, as_key_array
from gdsstore.tiers.core import Core
from gdsstore.tiers.holds import Hold, Loan, Reservation
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.room import make_room
from gdsstore.tiers.rows import I32, U8, U64, Mask, Origin, Room, State
from gdsstore.tiers.shelf import Shelf, Wanted
from gdsstore.tiers.writing import Writer
from gdsstore.waiting import Deadline


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of each key; arrays of shape (n,)."""

    room: U8  # `Room` values; GRANTED: the record is in the cache now
    due: Mask  # records on trial of which this was the second save: `write` them to the drive


class CachedNamespace:
    """Records of one namespace. Made by `HostCache.namespace`; thread-safe; lives as long as its cache is open.

    Keys are given in prefix order, the head of the prefix first: its end is evicted first. All calls raise ArgumentError for
    keys that are not 32 bytes, and StoreClosedError once the cache is closed.
    """

    def __init__(
        self, core: Core, writer: Writer, digest: bytes, number: int, page_bytes: int, shelf: Shelf
    ) -> None:
        self._core, self._writer, self._shelf = core, writer, shelf
        self._number, self._page_bytes = number, page_bytes
        self.digest = digest
        self.record_bytes = shelf.record_bytes

    def _wanted(self, keys: Keys) -> Wanted:
        array = as_key_array(keys)
        return Wanted(array.view(np.uint64), index_keys(array, self.digest)[0], self._number)

    # --- finding ---

    def get(self, keys: Keys) -> Hold:
        """The records that are there, held until the result is released. Counts hits and misses."""
        wanted = self._wanted(keys)
        with self._core.lock:
            core, shelf = self._core, self._shelf
            core.check_open()
            picked, ready = shelf.find_ready(wanted, core.stamp())
            core.tally.hits += ready
            core.tally.misses += len(picked) - ready
            due = shelf.hit(picked, ready)
        return Hold(core, shelf, picked, due.view(np.bool_))  # pinned: nobody changes these rows

    def lend(self, keys: Keys, owner: str, owner_limit_bytes: int, limit_bytes: int) -> Loan:
        """The clean records that are there, for another process, `owner`, to read until the result is released.

        No more of them, the first ones, than that all its loans have `owner_limit_bytes` bytes together, and those of all owners
        `limit_bytes`. They count as hits once the loan's `keep` has said which of them are lent; the others are misses.
        """
        wanted = self._wanted(keys)
        with self._core.lock:
            core, shelf = self._core, self._shelf
            core.check_open()
            picked, _ = shelf.find_ready(wanted, core.stamp())
            clean = picked >= 0
            clean[clean] = shelf.rows["standing"][picked[clean]] == Standing.CLEAN
            room_bytes = min(limit_bytes - core.lent.total(), owner_limit_bytes - core.lent[owner])
            room = max(0, room_bytes) // self.record_bytes
            there = int(np.count_nonzero(clean))
            lent = min(there, room)
            clean[np.flatnonzero(clean)[lent:]] = False
            picked[~clean] = -1
            core.tally.misses += len(picked) - there
            core.tally.not_lent += there - lent
            if lent:
                core.lent[owner] += lent * self.record_bytes
            shelf.pin_each(picked[clean])
        return Loan(core, shelf, picked, owner)

    def contains(self, keys: Keys) -> Mask:
        """Which records are there; they become the hottest. Shape (n,). Counts neither a hit nor a use."""
        wanted = self._wanted(keys)
        with self._core.lock:
            self._core.check_open()
            picked, _ = self._shelf.find_ready(wanted, self._core.stamp())
            return np.asarray(picked >= 0, np.bool_)

    # --- bringing ---

    def reserve(self, keys: Keys, origin: Origin, deadline: Deadline) -> Reservation:
        """Memory for the records that are not there yet, which the caller fills, verifies and commits.

        Evicts the coldest records. Waits only for dirty ones to be written, until the deadline. Where there is not room for
        all, the first keys get it.
        """
        return self._reserve(self._wanted(keys), origin, deadline)[0]

    def put(
        self,
        keys: Keys,
        pages: PageMemory,
        standing: Standing,
        deadline: Deadline,
        *,
        origin: Origin = Origin.SAVE,
        raw: U64 | None = None,
        drops: int | None = None,
        until: Deadline | None = None,
    ) -> PutResult:
        """Copy n pages of host memory in, as records. The pages are the caller's again when this returns.

        `raw`: what the raw checksum sums of their whole records should be, uint64 (n,): pages that are something else by now do not
        enter. `until`: what is copied later does not either, as the memory may hold something else by then. `drops`: what
        `self.drops` was before the pages were read from the drive, or saved to it: where something was dropped since, they do
        not enter. A record that is there already is not copied again: CLEAN makes it clean, DIRTY or TRIAL makes one on trial
        dirty. Raises ArgumentError, before anything is done, where the pages do not fit.
        """
        wanted = self._wanted(keys)
        n = len(wanted.hashes)
        checked(pages, n, self._page_bytes)
        if raw is not None and (raw.dtype != np.uint64 or raw.shape != (n,)):
            raise ArgumentError(f"raw must be uint64[{n}], one a page", dtype=raw.dtype, shape=raw.shape)
        reservation, due = self._reserve(wanted, origin, deadline, standing, drops)
        with reservation:
            at = np.flatnonzero(reservation.granted)
            if len(at):
                sums = np.zeros(n, np.uint64)
                sums[at] = self._copy_in(pages.take(at), reservation.address[at])
                good = reservation.granted.copy()
                if raw is not None:
                    good &= sums == raw
                if until is not None and until.passed:
                    good[:] = False
                visible = reservation.commit(good, sums, standing)
                reservation.room[reservation.granted & ~visible] = Room.NO_ROOM
        return PutResult(reservation.room, due)

    def _copy_in(self, pages: PageMemory, address: U64) -> U64:
        """The raw checksum sums of what was copied."""
        inside = address[:, None] + (np.cumsum(pages.length, axis=1) - pages.length).astype(np.uint64)
        copy_ranges(
            np.ascontiguousarray(pages.address.ravel()),
            np.ascontiguousarray(inside.ravel()),
            np.ascontiguousarray(pages.length.ravel()),
        )
        n, padding = len(address), self.record_bytes - self._page_bytes
        if padding:
            zero_ranges(address + np.uint64(self._page_bytes), np.full(n, padding, np.int64))
        return raw_sums(address, np.full(n, self.record_bytes, np.int64), np.zeros(n, np.int64))

    def _reserve(
        self,
        wanted: Wanted,
        origin: Origin,
        deadline: Deadline,
        saved_again: Standing | None = None,
        drops: int | None = None,
    ) -> tuple[Reservation, Mask]:
        n = len(wanted.hashes)
        due = np.zeros(n, np.bool_)
        with self._core.lock:
            core, shelf = self._core, self._shelf
            core.check_open()
            # What is there does not make room for the rest: a call that is too large keeps its head.
            there = shelf.find_ready(wanted, core.stamp())[0]
            there = np.unique(there[there >= 0])
            shelf.pin(there)
            try:
                make_room(core, self._writer, shelf, wanted, deadline)
            finally:
                shelf.unpin(there)
            core.check_open()
            if drops is not None and drops != core.drops[self._number]:
                nowhere = np.full(n, Room.NO_ROOM, np.uint8), np.full(n, -1, np.int32)
                return Reservation(core, shelf, *nowhere, origin), due
            room, picked = shelf.claim(wanted, self._page_bytes, origin)
            core.tally.no_room += int(np.count_nonzero(room == Room.NO_ROOM))
            present = room == Room.PRESENT
            if saved_again is not None and present.any():
                due[present] = self._saved_again(shelf.find(wanted.take(present)), saved_again)
        return Reservation(core, shelf, room, picked, origin), due

    def _saved_again(self, picked: I32, standing: Standing) -> Mask:
        """Ready rows whose keys were saved again. Returns which are due."""
        if standing is Standing.CLEAN:
            self._shelf.set_standing(np.unique(picked), Standing.CLEAN)
            return np.zeros(len(picked), np.bool_)
        due = np.asarray(self._shelf.rows["standing"][picked] == Standing.TRIAL, np.bool_)
        self._shelf.set_standing(np.unique(picked[due]), Standing.DIRTY)
        return due

    def write(self, keys: Keys, deadline: Deadline) -> None:
        """Write those of these records to the drive now that are dirty. What it does not take stays dirty."""
        wanted = self._wanted(keys)
        with self._core.lock:
            self._core.check_open()
            picked = self._shelf.find(wanted)
            dirty = self._shelf.unwritten(np.unique(picked[picked >= 0]))
            self._writer.write(self._shelf, dirty, dirty[:0], deadline)

    # --- dropping ---

    @property
    def drops(self) -> int:
        """How often something was dropped from this namespace; see `put`."""
        with self._core.lock:
            return self._core.drops[self._number]

    def drop(self, keys: Keys, deadline: Deadline) -> Mask:
        """Forget records, dirty ones too. Returns for each key whether there was one that readers saw. Shape (n,).

        What a reservation is about to bring of these keys will not be seen either. When this returns, nothing of them is being
        written to the drive any more; raises DeadlineError where that took too long. They are dropped all the same.
        """
        wanted = self._wanted(keys)
        with self._core.lock:
            self._core.check_open()
            picked = self._shelf.find(wanted)
            seen = np.zeros(len(picked), np.bool_)
            known = picked >= 0
            seen[known] = self._shelf.rows["state"][picked[known]] == State.READY
            self._drop(np.unique(picked[known]), deadline)
            return seen

    def clear(self, deadline: Deadline) -> int:
        """Forget all records of this namespace, as `drop` does. Returns how many there were."""
        with self._core.lock:
            self._core.check_open()
            return self._drop(self._shelf.of_namespace(self._number), deadline)

    def _drop(self, picked: I32, deadline: Deadline) -> int:
        core, shelf = self._core, self._shelf
        core.drops[self._number] += 1
        ready = int(np.count_nonzero(shelf.rows["state"][picked] == State.READY))
        core.tally.dropped += ready
        under_way = [entry for entry in core.writing if entry[0] is shelf and np.isin(entry[1], picked).any()]
        shelf.remove(picked)
        while any(each is entry for each in core.writing for entry in under_way):
            if deadline.passed:
                raise DeadlineError("dropped records are still being written to the drive; drop them again")
            core.changed.wait(deadline.left_s)
        return ready

"""Any order of calls, under several record sizes, against a model that knows which bytes belong to which key."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gdsstore.layout import align_up
from gdsstore.tiers.cached import CachedNamespace
from gdsstore.tiers.holds import Hold, Reservation
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import Origin, Room
from tests.tiers.caches import (
    BLOCK,
    REGION,
    Drive,
    bytes_at,
    check_books,
    keys_of,
    page_of,
    pages_of,
    record_sums,
    small_cache,
    soon,
    write_at,
)

REGIONS = 3
PAGE_BYTES = (BLOCK, 5000, BLOCK, 3 * BLOCK)  # of namespaces 0 to 3; the second and the last leave gaps
Page = tuple[int, int]  # namespace and number

spaces = st.integers(0, len(PAGE_BYTES) - 1)
numbers = st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)


@dataclass
class Filling:
    reservation: Reservation
    space: int
    numbers: list[int]
    version: int
    left: set[int] = field(default_factory=set)  # numbers that were granted and are not settled
    dropped: set[int] = field(default_factory=set)


class HostCaches(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.drive = Drive()
        self.cache = small_cache(self.drive, REGIONS)
        self.spaces: list[CachedNamespace] = [
            self.cache.namespace(bytes([i]) * 16, page_bytes) for i, page_bytes in enumerate(PAGE_BYTES)
        ]
        self.version = 0
        self.versions: dict[Page, int] = {}  # what a hit must show; not there: it must miss
        self.dirty: set[Page] = set()  # promised to the drive, and not known to be there
        self.holds: list[tuple[Hold, int, list[int], list[int]]] = []
        self.fillings: list[Filling] = []
        self.hung: list[tuple[list[bool], list[int], bytes]] = []
        self.lost = 0

    # --- calls ---

    @rule(space=spaces, numbers=numbers, keep=st.booleans())
    def get(self, space: int, numbers: list[int], keep: bool) -> None:
        hold = self.spaces[space].get(keys_of(*numbers))
        found = [number for number, there in zip(numbers, hold.found, strict=True) if there]
        versions = [self.versions[space, number] for number in found]  # a KeyError: it should have missed
        assert [space for _ in found] == [space] * int(hold.found.sum())
        for number, due in zip(numbers, hold.due, strict=True):
            if due:
                self.dirty.add((space, number))
        self._same(hold, space, found, versions)
        if keep:
            self.holds.append((hold, space, found, versions))
        else:
            hold.release()

    @rule(
        space=spaces,
        numbers=numbers,
        standing=st.sampled_from(Standing),
        fails=st.sampled_from([0, 0, 3, 100]),
    )
    def put(self, space: int, numbers: list[int], standing: Standing, fails: int) -> None:
        self.version += 1
        self.drive.refuses = fails
        pages = pages_of(*numbers, page_bytes=PAGE_BYTES[space], version=self.version)
        result = self.spaces[space].put(keys_of(*numbers), pages, standing, soon())
        self._after_writes()
        for number, room, due in zip(numbers, result.room, result.due, strict=True):
            page = (space, number)
            if room == Room.GRANTED:
                self.versions[page] = self.version
                self.dirty.discard(page)
                if standing is Standing.DIRTY:
                    self.dirty.add(page)
            elif room == Room.PRESENT:
                assert page in self.versions
                if standing is Standing.CLEAN:
                    self.dirty.discard(page)
            if due:
                assert room == Room.PRESENT
                self.dirty.add(page)

    @rule(space=spaces, numbers=numbers, origin=st.sampled_from(Origin))
    def reserve(self, space: int, numbers: list[int], origin: Origin) -> None:
        self.version += 1
        reservation = self.spaces[space].reserve(keys_of(*numbers), origin, soon())
        self._after_writes()
        filling = Filling(reservation, space, numbers, self.version)
        for number, granted, address in zip(numbers, reservation.granted, reservation.address, strict=True):
            if granted:
                filling.left.add(number)
                page = page_of(number, PAGE_BYTES[space], self.version)
                write_at(address, page + bytes(align_up(len(page)) - len(page)))
        self.fillings.append(filling)

    @precondition(lambda self: self.fillings)
    @rule(data=st.data(), standing=st.sampled_from(Standing))
    def commit(self, data: st.DataObject, standing: Standing) -> None:
        filling = data.draw(st.sampled_from(self.fillings))
        mask = np.array(
            data.draw(st.lists(st.booleans(), min_size=len(filling.numbers), max_size=len(filling.numbers)))
        )
        address = filling.reservation.address
        record_bytes = align_up(PAGE_BYTES[filling.space])
        raw = np.zeros(len(mask), np.uint64)
        mine = mask & (address > 0)
        raw[mine] = record_sums(address[mine], record_bytes) if mine.any() else 0
        seen = filling.reservation.commit(mask, raw, standing)
        for number, asked, is_seen in zip(filling.numbers, mask, seen, strict=True):
            assert is_seen == (asked and number in filling.left and number not in filling.dropped)
            if asked:
                filling.left.discard(number)
            if is_seen:
                page = (filling.space, number)
                self.versions[page] = filling.version
                self.dirty.discard(page)
                if standing is Standing.DIRTY:
                    self.dirty.add(page)

    @precondition(lambda self: self.fillings)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        filling = data.draw(st.sampled_from(self.fillings))
        self.fillings.remove(filling)
        filling.reservation.abort()

    @precondition(lambda self: self.fillings)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        filling = data.draw(st.sampled_from(self.fillings))
        self.fillings.remove(filling)
        state = [False]
        addresses = [
            int(address)
            for number, address in zip(filling.numbers, filling.reservation.address, strict=True)
            if number in filling.left
        ]
        filling.reservation.quarantine(lambda: state[0])
        mark = bytes([len(self.hung) % 256]) * align_up(PAGE_BYTES[filling.space])
        self.hung.append((state, addresses, mark))
        for address in addresses:
            write_at(address, mark)

    @precondition(lambda self: self.hung)
    @rule(data=st.data())
    def end_hang(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.hung))
        for address in entry[1]:
            assert bytes_at(address, len(entry[2])) == entry[2]
        entry[0][0] = True
        self.hung.remove(entry)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.holds))
        self.holds.remove(entry)
        self._same(*entry)
        entry[0].release()

    @rule(space=spaces, numbers=numbers)
    def drop(self, space: int, numbers: list[int]) -> None:
        self.spaces[space].drop(keys_of(*numbers), soon())
        self._forget(space, set(numbers))

    @rule(space=spaces)
    def clear(self, space: int) -> None:
        self.spaces[space].clear(soon())
        self._forget(space, set(range(10)))

    @rule(space=spaces, numbers=numbers, fails=st.sampled_from([0, 0, 3, 100]))
    def write(self, space: int, numbers: list[int], fails: int) -> None:
        self.drive.refuses = fails
        self.spaces[space].write(keys_of(*numbers), soon())
        self._after_writes()
        if not fails:
            assert self.dirty.isdisjoint({(space, number) for number in numbers})

    @rule(fails=st.integers(0, 40))
    def flush(self, fails: int) -> None:
        self.drive.refuses = fails
        left = self.cache.flush(20.0)
        self._after_writes()
        assert left == len(self.dirty)

    # --- what must hold ---

    @invariant()
    def books_are_right(self) -> None:
        check_books(self.cache)

    @invariant()
    def memory_is_bounded(self) -> None:
        stats = self.cache.stats()
        taken = stats.resident_bytes + sum(
            len(filling.left) * align_up(PAGE_BYTES[filling.space]) for filling in self.fillings
        )
        assert taken <= stats.size_bytes == REGIONS * REGION

    @invariant()
    def nothing_dirty_is_lost_without_being_counted(self) -> None:
        stats = self.cache.stats()
        assert stats.dirty_records == len(self.dirty)
        assert stats.dirty_lost == self.lost
        assert stats.written_back == self.drive.written

    @invariant()
    def what_is_held_stays(self) -> None:
        for entry in self.holds:
            self._same(*entry)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for hold, *_ in self.holds:
            hold.release()
        for filling in self.fillings:
            filling.reservation.abort()
        for state, *_ in self.hung:
            state[0] = True
        self.drive.refuses = 0
        assert self.cache.close(20.0)
        assert self.cache.stats().dirty_lost == self.lost

    # --- the model ---

    def _same(self, hold: Hold, space: int, found: list[int], versions: list[int]) -> None:
        addresses = hold.address[hold.found].tolist()
        for number, version, address in zip(found, versions, addresses, strict=True):
            page = page_of(number, PAGE_BYTES[space], version)
            assert bytes_at(address, align_up(len(page))) == page + bytes(align_up(len(page)) - len(page))

    def _after_writes(self) -> None:
        """What the drive took is not dirty any more; what it refused so often that it was given up is lost."""
        for page in list(self.dirty):
            space, number = page
            stored = self.drive.pages.get((bytes([space]) * 16, keys_of(number).tobytes()))
            if stored == page_of(number, PAGE_BYTES[space], self.versions[page]):
                self.dirty.discard(page)
        lost = self.cache.stats().dirty_lost - self.lost
        self.lost += lost
        # Those must be among the dirty ones that are gone, and all of these must be counted.
        gone = {page for page in self.dirty if not self.spaces[page[0]].contains(keys_of(page[1]))[0]}
        assert len(gone) == lost
        self.dirty -= gone

    def _forget(self, space: int, numbers: set[int]) -> None:
        for number in numbers:
            self.versions.pop((space, number), None)
            self.dirty.discard((space, number))
        for filling in self.fillings:
            if filling.space == space:
                filling.dropped |= numbers & filling.left


TestHostCaches = HostCaches.TestCase
TestHostCaches.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

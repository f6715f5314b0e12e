"""Pages of one namespace in the host cache, in front of the drives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from gdsstore.drive_pages import Call, DrivePages
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.memory.views import PageMemory
from gdsstore.prefetch import Prefetch, Prefetches
from gdsstore.tiers.cached import CachedNamespace
from gdsstore.tiers.holds import Hold
from gdsstore.tiers.policy import Standing, WritePolicy, save_rule
from gdsstore.tiers.rows import Origin, Room
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.results import LoadResult, PageStatus, SaveResult, Statuses, Unfinished
from gdsstore.waiting import Deadline
from gdsstore.warm_cache import WarmCache

log = logging.getLogger("gdsstore.store")

Ints = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
SLICE_BYTES = 4 << 20  # of the cache, between two looks at the drive

Later = Callable[[Callable[[Admission], None], int], None]
"""Runs a save in the background: the work, and its bytes."""


class WarmPages:
    """Thread-safe; lives as long as its store is open."""

    def __init__(
        self,
        drive: DrivePages,
        cached: CachedNamespace,
        cache: WarmCache,
        policy: WritePolicy,
        later: Later,
    ) -> None:
        self._drive, self._cached, self._cache = drive, cached, cache
        self._rule, self._later = save_rule(policy), later
        self.prefetches = Prefetches()

    @property
    def holds_unwritten(self) -> bool:
        """Whether there may be pages here that no drive has."""
        return not self._rule.writes_now

    # --- loading ---

    def load(self, call: Call) -> LoadResult:
        """From the cache and the drives at the same time. What a prefetch is bringing is waited for, not read twice."""
        status = np.full(len(call), PageStatus.MISS_ABSENT, np.uint8)
        unfinished: list[Unfinished] = []
        coming, prefetches = self.prefetches.bringing([key.tobytes() for key in call.keys])
        with self._cached.get(call.keys) as hold:
            hits = np.flatnonzero(hold.found)
            also_read = self._share(hits, len(call) - len(hits) - int((coming & ~hold.found).sum()))
            rest = np.union1d(np.flatnonzero(~hold.found & ~coming), also_read)
            copied = np.setdiff1d(hits, also_read)
            copying = self._copy(call, hold, copied, status, unfinished)
            if len(rest):
                result = self._read(call.take(rest), copying)
                status[rest] = result.status
                unfinished += result.unfinished
            for _ in copying:
                pass
            # What the drive did not have is here all the same.
            again = also_read[status[also_read] >= PageStatus.MISS_ABSENT]
            for _ in self._copy(call, hold, again, status, unfinished):
                pass
            self._write_due(call, hold)
        late = np.flatnonzero(coming & (status == PageStatus.MISS_ABSENT))
        if len(late):
            self._load_late(call, late, prefetches, status, unfinished)
        return LoadResult(status, unfinished)

    def _load_late(
        self,
        call: Call,
        late: Ints,
        prefetches: list[Prefetch],
        status: Statuses,
        unfinished: list[Unfinished],
    ) -> None:
        """What a prefetch was bringing."""
        for prefetch in prefetches:
            prefetch.wait(call.deadline.left_s)
        mine = call.take(late)
        found = np.full(len(late), PageStatus.MISS_ABSENT, np.uint8)
        with self._cached.get(mine.keys) as hold:
            for _ in self._copy(mine, hold, np.flatnonzero(hold.found), found, unfinished):
                pass
            left = np.flatnonzero(~hold.found)
        if len(left):
            result = self._read(mine.take(left), None)
            found[left] = result.status
            unfinished += result.unfinished
        status[late] = found

    def _share(self, hits: Ints, misses: int) -> Ints:
        """Which hits to read from the drive, the last ones, so that cache and drive are done at the same time."""
        memory, drive = self._cache.copying.bytes_per_s, self._cache.reading.bytes_per_s
        if not memory or not drive:
            return hits[:0]
        count = int((len(hits) * drive - misses * memory) / (memory + drive))
        if count * self._drive.record_bytes < SLICE_BYTES:
            return hits[:0]
        return hits[len(hits) - count :]

    def _read(self, call: Call, meanwhile: Iterator[None] | None) -> LoadResult:
        """From the drive into the caller's memory, and from there into the cache, where the host can see it."""
        raw = np.zeros(len(call), np.uint64)

        def landed(pages: Ints, sums: npt.NDArray[np.uint64]) -> None:
            raw[pages] = sums

        start = time.monotonic()
        result = self._drive.load(call, landed, meanwhile)
        good = np.flatnonzero(result.ok)
        self._cache.reading.add(len(good) * self._drive.record_bytes, time.monotonic() - start)
        good = good[raw[good] != 0]  # without verification nobody knows what has come
        if call.moving is None and len(good) and not call.deadline.passed:
            self._put(call.take(good), Standing.CLEAN, Origin.LOAD, raw[good])
        return result

    def _copy(
        self, call: Call, hold: Hold, which: Ints, status: Statuses, unfinished: list[Unfinished]
    ) -> Iterator[None]:
        """Copy records to where they belong, a slice at a time."""
        if len(which) == 0:
            return
        mover = self._drive.mover(call, Op.READ, len(which))
        step = max(1, SLICE_BYTES // self._drive.record_bytes)
        start, done = time.monotonic(), 0
        for first in range(0, len(which), step):
            part = which[first : first + step]
            try:
                late = mover.bring(
                    hold.address[part], call.memory.take(part), self._drive.record_bytes, call.deadline
                )
            except DeadlineError:
                status[which[first:]] = PageStatus.MISS_DEADLINE
                return
            except EngineError as error:
                log.error("pages of the host cache could not be put in place: %s", error)
                status[which[first:]] = PageStatus.MISS_IO
                return
            if late is not None:
                unfinished.append(late)
                status[which[first:]] = PageStatus.MISS_DEADLINE
                return
            status[part] = PageStatus.LOADED
            self._drive.count({PageStatus.LOADED.name: len(part)})
            done += len(part)
            yield
        self._cache.copying.add(done * self._drive.record_bytes, time.monotonic() - start)

    def _write_due(self, call: Call, hold: Hold) -> None:
        """Records on trial that were used again go to the drive, behind the call."""
        due = np.flatnonzero(hold.due)
        if len(due) == 0:
            return
        keys = call.keys[due].copy()

        def write(admission: Admission) -> None:
            with self._cached.get(keys) as again:
                there = np.flatnonzero(again.found)
                memory = PageMemory(again.address[there, None], again.payload_bytes[there, None], self)
                deadline = Deadline(self._drive.io_deadline_s)
                result = self._drive.save(Call(keys[there], memory, None, deadline, admission))
                self._cached.mark_written(keys[there][result.ok])

        self._later(write, len(due) * self._drive.record_bytes)

    # --- saving ---

    def save(self, call: Call) -> SaveResult:
        """To the drive or into the cache, as the policy says. Pages of a device go to the drive: nobody here sees them."""
        if call.moving is not None or self._rule.enters is None:
            return self._drive.save(call)
        if self._rule.writes_now:
            result = self._drive.save(call)
            good = np.flatnonzero(result.ok)
            if len(good) and not call.deadline.passed:
                self._put(call.take(good), Standing.CLEAN, Origin.SAVE, None)
            return result
        status = np.full(len(call), PageStatus.ALREADY_THERE, np.uint8)
        fresh = np.flatnonzero(~self._drive.has(call.keys))
        if len(fresh) == 0:
            return SaveResult(status)
        mine = call.take(fresh)
        put = self._cached.put(mine.keys, mine.memory, self._rule.enters, call.deadline)
        status[fresh[put.room == Room.GRANTED]] = PageStatus.SAVED
        to_drive = np.flatnonzero((put.room >= Room.FILLING) | put.due)
        if len(to_drive) == 0:
            return SaveResult(status)
        result = self._drive.save(mine.take(to_drive))
        status[fresh[to_drive]] = result.status
        written = to_drive[result.ok & put.due[to_drive]]
        if len(written):
            self._cached.mark_written(mine.keys[written])
        return SaveResult(status, result.unfinished)

    def _put(
        self, call: Call, standing: Standing, origin: Origin, raw: npt.NDArray[np.uint64] | None
    ) -> None:
        """Keep clean pages warm. Never waits for the drive."""
        self._cached.put(call.keys, call.memory, standing, Deadline(0.0), origin=origin, raw=raw)

    # --- prefetching ---

    def prefetch(
        self, keys: npt.NDArray[np.uint8], deadline: Deadline, admission: Admission, handle: Prefetch
    ) -> LoadResult:
        """Bring pages into the cache. Each chunk can be used as soon as it is verified."""
        status = np.full(len(keys), PageStatus.LOADED, np.uint8)
        with self._cached.reserve(keys, Origin.PREFETCH, deadline) as reservation:
            handle.add(int(np.count_nonzero(reservation.room == Room.PRESENT)))
            status[reservation.room >= Room.FILLING] = PageStatus.MISS_ABSENT
            at = np.flatnonzero(reservation.granted)
            if len(at) == 0:
                return LoadResult(status)
            length = np.full((len(at), 1), self._drive.record_bytes, np.int64)
            memory = PageMemory(reservation.address[at, None], length, self)
            raw = np.zeros(len(keys), np.uint64)

            def landed(pages: Ints, sums: npt.NDArray[np.uint64]) -> None:
                mask = np.zeros(len(keys), np.bool_)
                mask[at[pages]] = True
                raw[at[pages]] = sums
                handle.add(int(np.count_nonzero(reservation.commit(mask, raw))))

            start = time.monotonic()
            result = self._drive.load(Call(keys[at], memory, None, deadline, admission), landed, verify=True)
            good = int(np.count_nonzero(result.ok))
            self._cache.reading.add(good * self._drive.record_bytes, time.monotonic() - start)
            if result.memory_in_use:
                reservation.quarantine(lambda: not result.memory_in_use)
        status[at] = result.status
        return LoadResult(status)

    # --- the rest ---

    def contains(self, keys: npt.NDArray[np.uint8]) -> Mask:
        """Which pages are here. Shape (n,)."""
        return self._cached.contains(keys)

    def drop(self, keys: npt.NDArray[np.uint8], deadline: Deadline) -> Mask:
        """Forget pages; which were here, shape (n,). Raises DeadlineError where one is being written for too long."""
        return self._cached.drop(keys, deadline)

    def clear(self, deadline: Deadline) -> int:
        return self._cached.clear(deadline)

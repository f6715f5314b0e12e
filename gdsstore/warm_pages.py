"""Pages of one namespace in the host cache, in front of the drives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.drive_pages import Call, DrivePages
from gdsstore.engines.base import Op
from gdsstore.layered_calls import LayeredLoad
from gdsstore.layout import PageLayout
from gdsstore.lending import Lent, lend
from gdsstore.memory.views import PageMemory
from gdsstore.prefetch import Prefetch, Prefetches
from gdsstore.sealed_pages import SealedPages
from gdsstore.tiers.cached import CachedNamespace
from gdsstore.tiers.holds import Hold
from gdsstore.tiers.policy import Standing, WritePolicy, save_rule
from gdsstore.tiers.rows import Origin, Room
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.results import LoadResult, PageStatus, SaveResult, Statuses, Unfinished
from gdsstore.waiting import Deadline
from gdsstore.warm_cache import WarmCache
from gdsstore.warm_copies import WarmCopies
from gdsstore.warm_layers import WarmLayers

if TYPE_CHECKING:
    from gdsstore.store import Store

log = logging.getLogger("gdsstore.store")

Ints = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
PATIENCE = 0.5  # of a load's time, for what a prefetch is bringing
LOOK_S = 0.05  # whether a load that waits was cancelled

Later = Callable[[Callable[[], None], int], None]
"""Runs a save in the background: the work, and its bytes."""


class WarmPages:
    """Thread-safe; lives as long as its store is open."""

    def __init__(
        self,
        drive: DrivePages | SealedPages,
        cached: CachedNamespace,
        cache: WarmCache,
        policy: WritePolicy,
        later: Later,
    ) -> None:
        self._drive, self._cached, self._cache = drive, cached, cache
        self._copies = WarmCopies(drive, cache)
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
        coming, prefetches = self.prefetches.before_load(call.keys)
        with self._cached.get(call.keys) as hold:
            hits = np.flatnonzero(hold.found)
            also_read = self._copies.share(hits, len(call) - len(hits) - int((coming & ~hold.found).sum()))
            rest = np.union1d(np.flatnonzero(~hold.found & ~coming), also_read)
            copied = np.setdiff1d(hits, also_read)
            copying = self._copies.copy(call, hold, copied, status, unfinished)
            if call.moving is not None:
                # Not beside the reads: who holds staging memory for these must not wait for more of it.
                for _ in copying:
                    pass
            if len(rest):
                result = self._read(call.take(rest), copying)
                status[rest] = result.status
                unfinished += result.unfinished
            for _ in copying:
                pass
            # What the drive did not have is here all the same.
            again = also_read[status[also_read] >= PageStatus.MISS_ABSENT]
            for _ in self._copies.copy(call, hold, again, status, unfinished):
                pass
            self._write_due(call, hold)
        late = np.flatnonzero(coming & (status == PageStatus.MISS_ABSENT))
        if len(late):
            self._load_late(call, late, prefetches, status, unfinished)
        return LoadResult(status, unfinished)

    def load_layers(self, call: Call, layered: LayeredLoad, layout: PageLayout) -> LoadResult:
        """As `load`, layer by layer. What a prefetch is bringing is read again."""
        status = np.full(len(call), PageStatus.MISS_ABSENT, np.uint8)
        self.prefetches.before_load(call.keys)
        with self._cached.get(call.keys) as hold:
            mover = self._drive.mover(call, Op.READ, len(call))
            at, rest = np.flatnonzero(hold.found), np.flatnonzero(~hold.found)
            warm = WarmLayers(call.memory, at, hold.address[at], layout, mover, call.deadline)
            if call.moving is not None:  # not beside the reads: see `load`
                warm.bring(0, layout.layers)
            layered.beside(warm, rest)
            unfinished = warm.unfinished
            try:
                if len(rest):
                    result = self._read(call.take(rest), None, layered)
                    status[rest] = result.status
                    unfinished += result.unfinished
            finally:
                layered.tell_rest()  # while the records are held, whatever the drives' part has come to
            good = warm.status == PageStatus.PENDING
            status[warm.at] = np.where(good, PageStatus.LOADED, warm.status)
            self._copies.count(int(np.count_nonzero(good)))
            self._write_due(call, hold)
        return LoadResult(status, unfinished)

    def _load_late(
        self,
        call: Call,
        late: Ints,
        prefetches: list[Prefetch],
        status: Statuses,
        unfinished: list[Unfinished],
    ) -> None:
        """What prefetches are bringing, as it comes. Where that takes too long, there is time left to read it from the drive."""
        patience = Deadline(call.deadline.left_s * PATIENCE)
        for prefetch in prefetches:
            ended = False
            while len(late) and not ended and not patience.passed and not call.admission.stopping:
                ended, warm = prefetch.done, prefetch.progress.warm
                late = self._load_warm(call, late, status, unfinished)
                if len(late):
                    prefetch.wait_for_more(warm, min(LOOK_S, patience.left_s))
        if len(late):
            result = self._read(call.take(late), None)
            status[late] = result.status
            unfinished += result.unfinished

    def _load_warm(self, call: Call, pages: Ints, status: Statuses, unfinished: list[Unfinished]) -> Ints:
        """Load those of the pages that are in the cache by now; the others."""
        here = self._cached.contains(call.keys[pages])
        mine, at = call.take(pages[here]), pages[here]
        with self._cached.get(mine.keys) as hold:
            found = np.full(len(mine), PageStatus.MISS_ABSENT, np.uint8)
            for _ in self._copies.copy(mine, hold, np.flatnonzero(hold.found), found, unfinished):
                pass
            status[at] = found
            gone = at[~hold.found]
        return np.union1d(pages[~here], gone)

    def _read(
        self, call: Call, meanwhile: Iterator[None] | None, layered: LayeredLoad | None = None
    ) -> LoadResult:
        """From the drive into the caller's memory, and from there into the cache, where the host can see it."""
        raw = np.zeros(len(call), np.uint64)
        drops = self._cached.drops

        def landed(pages: Ints, sums: npt.NDArray[np.uint64]) -> None:
            raw[pages] = sums

        start = time.monotonic()
        result = self._drive.load(call, landed, meanwhile, layered=layered)
        good = np.flatnonzero(result.ok)
        self._cache.reading.add(len(good) * self._drive.record_bytes, time.monotonic() - start)
        good = good[raw[good] != 0]  # without verification nobody knows what has come
        if call.moving is None and len(good) and not call.deadline.passed:
            self._keep(call.take(good), Origin.LOAD, raw[good], drops)
        return result

    def _write_due(self, call: Call, hold: Hold) -> None:
        """Records on trial that were used again go to the drive, behind the call."""
        due = np.flatnonzero(hold.due)
        if len(due) == 0:
            return
        keys = call.keys[due].copy()
        self._later(
            lambda: self._cached.write(keys, Deadline(self._drive.io_deadline_s)),
            len(due) * self._drive.record_bytes,
        )

    # --- saving ---

    def save(self, call: Call) -> SaveResult:
        """To the drive or into the cache, as the policy says. Pages of a device go to the drive: nobody here sees them."""
        if call.moving is not None or self._rule.enters is None:
            return self._drive.save(call)
        if self._rule.writes_now:
            drops = self._cached.drops
            result = self._drive.save(call)
            good = np.flatnonzero(result.ok)
            if len(good) and not call.deadline.passed:
                self._keep(call.take(good), Origin.SAVE, None, drops)
            return result
        status = np.full(len(call), PageStatus.ALREADY_THERE, np.uint8)
        fresh = np.flatnonzero(~self._drive.has(call.keys))
        if len(fresh) == 0:
            return SaveResult(status)
        mine = call.take(fresh)
        put = self._cached.put(mine.keys, mine.memory, self._rule.enters, call.deadline, until=call.deadline)
        status[fresh[put.room == Room.GRANTED]] = PageStatus.SAVED
        if put.due.any():
            self._cached.write(mine.keys[put.due], call.deadline)
        to_drive = np.flatnonzero(put.room >= Room.FILLING)
        if len(to_drive) == 0:
            return SaveResult(status)
        result = self._drive.save(mine.take(to_drive))
        status[fresh[to_drive]] = result.status
        return SaveResult(status, result.unfinished)

    def _keep(self, call: Call, origin: Origin, raw: npt.NDArray[np.uint64] | None, drops: int) -> None:
        """Keep clean pages warm, unless some were dropped meanwhile. Never waits for the drive."""
        self._cached.put(
            call.keys,
            call.memory,
            Standing.CLEAN,
            Deadline(0.0),
            origin=origin,
            raw=raw,
            drops=drops,
            until=call.deadline,
        )

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

    def lend(self, store: Store, keys: npt.NDArray[np.uint8], owner: str) -> Lent:
        """See `lending.lend`. Nothing where the cache has other bytes than the drives, which nobody could check."""
        if not isinstance(self._drive, DrivePages):
            return Lent(None, len(keys), self._drive.record_bytes)
        return lend(store, self._drive, self._cached, keys, owner)

    def contains(self, keys: npt.NDArray[np.uint8]) -> Mask:
        """Which pages are here. Shape (n,)."""
        return self._cached.contains(keys)

    def drop(self, keys: npt.NDArray[np.uint8], deadline: Deadline) -> Mask:
        """Forget pages; which were here, shape (n,). Raises DeadlineError where one is being written for too long."""
        return self._cached.drop(keys, deadline)

    def clear(self, deadline: Deadline) -> int:
        return self._cached.clear(deadline)

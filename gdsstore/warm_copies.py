"""Records of the host cache on their way to where a load wants them, and how many of them the drive may bring instead."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gdsstore.drive_pages import Call, DrivePages
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.sealed_pages import SealedPages
from gdsstore.tiers.holds import Hold
from gdsstore.transfer.results import PageStatus, Statuses, Unfinished
from gdsstore.warm_cache import WarmCache

log = logging.getLogger("gdsstore.store")

Ints = npt.NDArray[np.intp]
SLICE_BYTES = 4 << 20  # of the cache, between two looks at the drive
FROM_HOST = "LOADED_FROM_HOST"  # of those LOADED: told apart in the counters


class WarmCopies:
    """Of one namespace. Thread-safe."""

    def __init__(self, drive: DrivePages | SealedPages, cache: WarmCache) -> None:
        self._drive, self._cache = drive, cache

    def share(self, hits: Ints, misses: int) -> Ints:
        """Which hits to read from the drive, the last ones, so that cache and drive are done at the same time."""
        memory, drive = self._cache.copying.bytes_per_s, self._cache.reading.bytes_per_s
        if not memory or not drive:
            return hits[:0]
        count = int((len(hits) * drive - misses * memory) / (memory + drive))
        if count * self._drive.record_bytes < SLICE_BYTES:
            return hits[:0]
        return hits[len(hits) - count :]

    def copy(
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
            self.count(len(part))
            done += len(part)
            yield
        self._cache.copying.add(done * self._drive.record_bytes, time.monotonic() - start)

    def count(self, pages: int) -> None:
        """So many pages came from the cache."""
        self._drive.count({PageStatus.LOADED.name: pages, FROM_HOST: pages})

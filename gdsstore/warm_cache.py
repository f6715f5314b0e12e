"""The store's host cache: made for the first namespace, written back through the drives, its prefetches kept useful."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np

from gdsstore.checksum.host import raw_sums
from gdsstore.config import Config
from gdsstore.drive_pages import Call, DrivePages
from gdsstore.errors import StoreError
from gdsstore.memory.arena import Arena
from gdsstore.memory.known import KnownMemory
from gdsstore.memory.shared import SharedMemory
from gdsstore.memory.views import PageMemory
from gdsstore.moving import make_arena, make_shared_arena
from gdsstore.sealed_pages import SealedPages
from gdsstore.sizes import MiB
from gdsstore.tiers.cached import CachedNamespace
from gdsstore.tiers.host import REGION_BYTES, HostCache
from gdsstore.tiers.writing import DirtyRecords
from gdsstore.transfer.admission import FreeAdmission
from gdsstore.transfer.results import PageStatus, SaveResult
from gdsstore.volume.volume import Volume
from gdsstore.waiting import Deadline

REGIONS = 8  # at the least: one for each of a few record sizes
JUDGED_AFTER = 256  # prefetched pages; before, their waste says nothing
LEAST_SHARE = 0.125  # of a prefetch that is still made when all of the last ones were wasted
FORGET = 0.5  # of what is known of earlier prefetches, each time that so many more are judged


class Speed:
    """Bytes a second, as a moving average. Thread-safe enough: a lost update loses one sample."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # 0: not known

    def add(self, nbytes: int, seconds: float) -> None:
        if nbytes < MiB or seconds <= 0:
            return  # what a call costs, not what memory or a drive does
        now = nbytes / seconds
        self.bytes_per_s = now if self.bytes_per_s == 0 else 0.8 * self.bytes_per_s + 0.2 * now


class WarmCache:
    """Thread-safe."""

    def __init__(self, config: Config, volume: Volume) -> None:
        self._config, self._volume = config, volume
        self._lock = threading.Lock()
        self._cache: HostCache | None = None
        self._drives: dict[bytes, DrivePages | SealedPages] = {}
        self._shared: SharedMemory | None = None
        self._closed = False
        self.copying, self.reading = Speed(), Speed()
        self._judged = self._wasted = 0.0
        self._seen = (0, 0)

    def namespace(self, drive: DrivePages | SealedPages) -> CachedNamespace:
        """Raises ArgumentError, StoreError where there is not enough memory."""
        with self._lock:
            cache = self._opened()
            self._drives[drive.digest] = drive
            return cache.namespace(drive.digest, drive.page_bytes)

    def _opened(self) -> HostCache:
        """With the lock held: the cache, which the first call makes."""
        if self._closed:
            raise StoreError("the host cache is closed")
        if self._cache is None:
            size = self._config.host_cache
            region = min(REGION_BYTES, size // REGIONS // MiB * MiB or MiB)
            self._cache = HostCache(self._make_arena, self._write_back, region_bytes=region)
        return self._cache

    def _make_arena(self) -> Arena:
        size = self._config.host_cache
        if not self._config.share_host_cache:
            return make_arena(self._config, size, self._volume)
        arena = make_shared_arena(self._config, size, self._volume)
        self._shared = arena.shared
        return arena

    def shared(self) -> SharedMemory | None:
        """The memory of the cache, for others to map; None where it is not shared. Raises as `namespace` does."""
        if not self._config.host_cache or not self._config.share_host_cache:
            return None
        with self._lock:
            self._opened()
            return self._shared

    def _write_back(self, records: DirtyRecords, deadline: Deadline) -> SaveResult:
        """What has other bytes than when it came is not written. The checksums tell that a save computes anyway; those of sealed
        pages are of other bytes, so that these are looked at before."""
        drive = self._drives[records.namespace_digest]
        address, length = records.address[:, None], records.payload_bytes[:, None]
        if not isinstance(drive, SealedPages):
            known = KnownMemory(address=address, length=length, owner=None, raw=records.raw)
            return drive.save(Call(records.keys, known, None, deadline, FreeAdmission()))
        n = len(records.raw)
        sums = raw_sums(records.address, np.full(n, records.record_bytes, np.int64), np.zeros(n, np.int64))
        same = np.flatnonzero(sums == records.raw)
        status = np.full(n, PageStatus.FAILED_CHECKSUM, np.uint8)
        drive.count({PageStatus.FAILED_CHECKSUM.name: n - len(same)})
        call = Call(records.keys, PageMemory(address, length, None), None, deadline, FreeAdmission())
        result = drive.save(call.take(same))
        status[same] = result.status
        return SaveResult(status, result.unfinished)

    def worth_prefetching(self, pages: int) -> int:
        """How many of so many pages to prefetch, the first ones: fewer, the more of the last ones nobody wanted."""
        with self._lock:
            if self._cache is None:
                return pages
            stats = self._cache.stats()
            wasted, brought = stats.unused_prefetch, stats.inserted_prefetch
            if brought - self._seen[1] >= JUDGED_AFTER:
                self._wasted = FORGET * self._wasted + wasted - self._seen[0]
                self._judged = FORGET * self._judged + brought - self._seen[1]
                self._seen = wasted, brought
            share = 1.0 if self._judged == 0 else 1.0 - min(self._wasted / self._judged, 1.0)
        return max(1, int(np.ceil(pages * max(share, LEAST_SHARE))))

    def stats(self) -> dict[str, Any] | None:
        """As plain values; None where there is no cache (yet)."""
        with self._lock:
            return None if self._cache is None else dataclasses.asdict(self._cache.stats())

    def sweep(self) -> None:
        """See HostCache.sweep."""
        with self._lock:
            cache = self._cache
        if cache is not None:
            cache.sweep()

    def flush(self, timeout_s: float) -> int:
        """Write what is dirty; returns how many records are left."""
        with self._lock:
            cache = self._cache
        return 0 if cache is None else cache.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is dirty, and give the memory back. Idempotent."""
        with self._lock:
            self._closed, cache = True, self._cache
        if cache is not None:
            cache.close(timeout_s)

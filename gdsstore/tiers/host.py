"""The host cache (L2): records in host memory, the same bytes as on the drive, bounded, the coldest evicted first.

The memory is cut into regions of equal size. A region holds records of one size, and goes to another size as a whole once all
it holds is colder than what the other would evict: no record is ever moved, and no hole is left that fits nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gdsstore.errors import ArgumentError
from gdsstore.layout import ALIGNMENT, MAX_PAGE_BYTES, align_up
from gdsstore.memory.arena import Arena
from gdsstore.namespace import DIGEST_BYTES
from gdsstore.tiers.cached import CachedNamespace
from gdsstore.tiers.core import Core
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.stats import CacheStats
from gdsstore.tiers.writing import BATCH_BYTES, WriteBack, Writer
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.tiers")

REGION_BYTES = 32 << 20
_FLUSH_PASSES = 2
_POLL_S = 0.002  # nobody calls when a transfer that hung ends


class HostCache:
    """Records of many namespaces. Thread-safe; its lock is never held while bytes move.

    Use as a context manager, or `close` it.
    """

    def __init__(
        self, make_arena: Callable[[], Arena], write_back: WriteBack, *, region_bytes: int = REGION_BYTES
    ) -> None:
        """`make_arena` gives the memory, all of which the cache takes; it is closed with the cache.

        `region_bytes`: a multiple of 4 KiB, several times the largest record; records larger than a region are never cached.
        Raises ArgumentError where the arena has no room for one region, and what `make_arena` raises.
        """
        if region_bytes <= 0 or region_bytes % ALIGNMENT:
            raise ArgumentError(f"regions must be a multiple of {ALIGNMENT} bytes", region_bytes=region_bytes)
        self._arena = make_arena()
        if self._arena.size_bytes < region_bytes:
            size_bytes = self._arena.size_bytes
            self._arena.close(timeout_s=0.0)
            raise ArgumentError(
                "the host cache needs memory for at least one region; give it more, or make regions smaller",
                size_bytes=size_bytes,
                region_bytes=region_bytes,
            )
        self._lease = self._arena.lease(self._arena.size_bytes, timeout_s=0.0)
        self._core = Core(self._lease.address, region_bytes, self._arena.size_bytes // region_bytes)
        self._digests: list[bytes] = []
        self._page_bytes: list[int] = []
        self._writer = Writer(self._core, write_back, self._digests)

    def namespace(self, digest: bytes, page_bytes: int) -> CachedNamespace:
        """The records of one namespace, whose pages have `page_bytes` bytes.

        Raises ArgumentError for a digest that is not 16 bytes or was given with pages of another size before, StoreClosedError
        once the cache is closed.
        """
        if len(digest) != DIGEST_BYTES:
            raise ArgumentError(f"a namespace digest has {DIGEST_BYTES} bytes", nbytes=len(digest))
        if not 0 < page_bytes <= MAX_PAGE_BYTES:
            raise ArgumentError(f"pages have 1 to {MAX_PAGE_BYTES} bytes", page_bytes=page_bytes)
        with self._core.lock:
            self._core.check_open()
            if digest not in self._digests:
                self._digests.append(digest)
                self._page_bytes.append(page_bytes)
            number = self._digests.index(digest)
            if self._page_bytes[number] != page_bytes:
                raise ArgumentError(
                    "one namespace cannot have pages of two sizes",
                    namespace=digest,
                    page_bytes=page_bytes,
                    before=self._page_bytes[number],
                )
            shelf = self._core.shelf(align_up(page_bytes))
        return CachedNamespace(self._core, self._writer, digest, number, page_bytes, shelf)

    def stats(self) -> CacheStats:
        """What is where now, and what was counted since the cache was opened."""
        with self._core.lock:
            return self._core.stats()

    def sweep(self) -> None:
        """Let go of records that transfers which hung have let go of. `close` and whoever needs room do so too."""
        with self._core.lock:
            if not self._core.closed:
                self._core.sweep()

    def flush(self, timeout_s: float) -> int:
        """Write what is dirty, in at most `timeout_s` seconds. Returns how many dirty records are left.

        What could not be written is tried once more, and stays dirty after that. Raises StoreClosedError once the cache is closed.
        """
        deadline = Deadline(timeout_s)
        with self._core.lock:
            self._core.check_open()
            return self._flush(deadline)

    def close(self, timeout_s: float) -> bool:
        """Refuse new calls, write what is dirty, wait for holds and reservations to end, and give the memory back. Idempotent.

        All in at most `timeout_s` seconds. Dirty records that are left are lost, counted in `dirty_lost` and logged. Returns
        False where memory was still in use; it then stays allocated on purpose, and a later `close` tries again.
        """
        deadline = Deadline(timeout_s)
        core = self._core
        with core.lock:
            core.closed = True
            if self._flush(deadline):
                self._give_up()
            while core.pins:
                if core.sweep():
                    continue
                if deadline.passed:
                    log.warning("the host cache's memory stays allocated: %d pins are left", core.pins)
                    return False
                core.changed.wait(min(deadline.left_s, _POLL_S) if core.quarantined else deadline.left_s)
        self._lease.release()
        return self._arena.close(deadline.left_s)

    def _flush(self, deadline: Deadline) -> int:
        """With the lock held, which it gives up while the drive writes."""
        core = self._core
        for _ in range(_FLUSH_PASSES):
            for shelf in list(core.shelves.values()):
                batch = max(1, BATCH_BYTES // shelf.record_bytes)
                dirty = shelf.all_dirty()
                for first in range(0, len(dirty), batch):
                    left = shelf.unwritten(dirty[first : first + batch])
                    self._writer.write(shelf, left, left[:0], deadline)
            while core.writing and not deadline.passed:  # by calls that make room
                core.changed.wait(deadline.left_s)
        return core.dirty

    def _give_up(self) -> None:
        """With the lock held: count what is dirty as lost."""
        lost = self._core.dirty
        self._core.tally.dirty_lost += lost
        log.error("the host cache was closed with %d dirty records that were not written in time", lost)
        for shelf in self._core.shelves.values():
            dirty = shelf.rows["standing"] == Standing.DIRTY
            shelf.rows["standing"][dirty] = Standing.CLEAN
            shelf.dirty = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout_s=30.0)

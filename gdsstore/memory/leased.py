"""What arenas of every kind of memory have in common: leases, back-pressure, and an end that waits for them."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from gdsstore.errors import ArgumentError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory.lease import ArenaStats, Lease, Memory
from gdsstore.memory.lease_pool import LeasePool

log = logging.getLogger(__name__)


class LeasedMemory(ABC):
    """Memory handed out in leases of any size at multiples of 4 KiB. Thread-safe.

    Use as a context manager, or `close` it. `size_bytes` and `slot_bytes` never change.
    """

    def __init__(self, memory: Memory, size_bytes: int, slot_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.slot_bytes = slot_bytes
        self._pool = LeasePool(memory, size_bytes, slot_bytes)
        self._closing = threading.Lock()

    def lease(self, nbytes: int, timeout_s: float) -> Lease:
        """`nbytes` contiguous bytes, after at most `timeout_s` seconds (0: now or not at all).

        Requests are served in the order they came: a large one is not overtaken by small ones for ever. Do not wait for a
        second lease while holding one that the second needs to have released. The bytes hold what was last in them.

        Raises ArgumentError at once for a request that never fits, DeadlineError where there was no room in time,
        StoreClosedError once the arena is closed.
        """
        return self._pool.lease(nbytes, timeout_s)

    def stats(self) -> ArenaStats:
        """Where the bytes are now."""
        return self._pool.stats()

    def close(self, timeout_s: float) -> bool:
        """Refuse new leases, wait for the old ones and for quarantined bytes, then give the memory back. Idempotent.

        Returns False where some had not ended after `timeout_s` seconds, or the memory could not be given back. It then
        stays allocated on purpose, as someone may still write to it; a later `close` tries again.
        """
        if not self._pool.close(timeout_s):
            stats = self._pool.stats()
            log.warning(
                "an arena of %d bytes stays allocated: %d bytes leased, %d in quarantine after %.1f s",
                self.size_bytes,
                stats.leased_bytes,
                stats.quarantined_bytes,
                timeout_s,
            )
            return False
        with self._closing:
            if not self._give_back():
                return False
            self._pool.forget_memory()
        return True

    @abstractmethod
    def _give_back(self) -> bool:
        """Give back the memory, which nobody uses any more; whether that was done. Idempotent. One thread at a time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout_s=30.0)


def whole_slots(size_bytes: int, slot_bytes: int) -> int:
    """`size_bytes`, rounded up to whole slots. Raises ArgumentError where either makes no sense."""
    if size_bytes <= 0:
        raise ArgumentError("an arena needs at least one byte", size_bytes=size_bytes)
    if slot_bytes <= 0 or slot_bytes % ALIGNMENT:
        raise ArgumentError(f"slots must be a multiple of {ALIGNMENT} bytes", slot_bytes=slot_bytes)
    return -(-size_bytes // slot_bytes) * slot_bytes

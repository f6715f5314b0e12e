"""Who has which bytes of an arena, and who waits for room."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from gdsstore.errors import ArgumentError, DeadlineError, StoreClosedError
from gdsstore.memory.free_ranges import FreeRanges
from gdsstore.memory.lease import ArenaStats, Lease, Memory
from gdsstore.waiting import Deadline

log = logging.getLogger(__name__)

# Nobody calls when a quarantined transfer ends, so whoever needs its bytes looks this often.
_POLL_S = 0.002

# Memory with leases that have not ended. Holding it here keeps it mapped under the kernel's I/O even where a program
# drops its arena without closing it.
_IN_USE: set[Memory] = set()


class LeasePool:
    """Hands out the first `size_bytes` of a memory in whole slots. Thread-safe; first come, first served."""

    def __init__(self, memory: Memory, size_bytes: int, slot_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory: Memory | None = memory
        self._slot_bytes = slot_bytes
        self._free = FreeRanges(size_bytes)
        self._lock = threading.Lock()
        # One condition a waiter, so that room wakes the first of them and not all.
        self._queue: deque[threading.Condition] = deque()
        self._idle = threading.Condition(self._lock)
        self._quarantined: set[Lease] = set()
        self._sweeping = False
        self._closed = False
        self._leased_bytes = self._quarantined_bytes = self._peak_bytes = 0
        self._waits = self._timeouts = 0

    def lease(self, nbytes: int, timeout_s: float) -> Lease:
        """See `LeasedMemory.lease`."""
        if not 0 < nbytes <= self.size_bytes:
            raise ArgumentError(
                "a lease must have at least one byte and fit into the arena; make the arena larger or the lease smaller",
                lease_bytes=nbytes,
                arena_bytes=self.size_bytes,
            )
        reserved = -(-nbytes // self._slot_bytes) * self._slot_bytes
        with self._lock:
            memory = self._open_memory()
            # Nobody overtakes: behind a large request that waits, small ones would else take each byte that frees.
            offset = None if self._queue else self._free.take(reserved)
            if offset is None:
                offset = self._queue_for(reserved, Deadline(timeout_s))
            self._leased_bytes += reserved
            self._peak_bytes = max(self._peak_bytes, self._leased_bytes + self._quarantined_bytes)
            _IN_USE.add(memory)
        return Lease(self, memory, offset, nbytes, reserved)

    def pin(self, lease: Lease) -> None:
        with self._lock:
            if lease._ended:
                raise ArgumentError("the lease has ended and cannot be pinned")
            lease._pins += 1

    def unpin(self, lease: Lease) -> None:
        with self._lock:
            if lease._pins == 0:
                raise ArgumentError("the lease has no pin to take away")
            lease._pins -= 1
            if lease._pins == 0 and lease._ended:
                self._settle(lease)

    def end(self, lease: Lease, done: Callable[[], bool] | None) -> None:
        with self._lock:
            if done is not None:
                if lease._done is not None:
                    raise ArgumentError(
                        "the lease is in quarantine; give it one condition that covers all transfers"
                    )
                if lease._memory is None:
                    raise ArgumentError(
                        "the lease was released; its bytes may belong to someone else already"
                    )
                lease._done = done
            lease._ended = True
            if lease._memory is not None and lease._pins == 0:
                self._settle(lease)

    def forget_memory(self) -> None:
        """After `close` was true: let go of the memory, so that it is unmapped when its last array goes."""
        with self._lock:
            self._memory = None

    def stats(self) -> ArenaStats:
        with self._lock:
            return ArenaStats(
                self.size_bytes,
                self._leased_bytes,
                self._quarantined_bytes,
                self._peak_bytes,
                self._waits,
                self._timeouts,
            )

    def close(self, timeout_s: float) -> bool:
        """Refuse new leases and wait for the old ones to end; whether all have."""
        deadline = Deadline(timeout_s)
        with self._lock:
            self._closed = True
            for waiter in self._queue:
                waiter.notify()
            while True:
                self._sweep()
                if not self._leased_bytes and not self._quarantined:
                    return True
                if deadline.passed:
                    return False
                self._idle.wait(self._patience(deadline))

    # All below: with the lock held.

    def _open_memory(self) -> Memory:
        if self._closed or self._memory is None:
            raise StoreClosedError("the arena was closed")
        return self._memory

    def _queue_for(self, reserved: int, deadline: Deadline) -> int:
        """Wait until `reserved` bytes are taken; their offset."""
        waiter = threading.Condition(self._lock)
        self._queue.append(waiter)
        waited = False
        try:
            while True:
                self._open_memory()
                if self._queue[0] is waiter:
                    self._sweep()
                    self._open_memory()
                    offset = self._free.take(reserved)
                    if offset is not None:
                        return offset
                if deadline.passed:
                    self._timeouts += waited
                    raise DeadlineError(
                        "no room in the arena in time; make it larger, or have fewer transfers under way",
                        lease_bytes=reserved,
                        arena_bytes=self.size_bytes,
                        largest_free_bytes=self._free.largest,
                        quarantined_bytes=self._quarantined_bytes,
                        waiting_before=self._queue.index(waiter),
                    )
                self._waits += not waited
                waited = True
                waiter.wait(self._patience(deadline))
        finally:
            self._queue.remove(waiter)
            self._wake()

    def _patience(self, deadline: Deadline) -> float:
        return min(deadline.left_s, _POLL_S) if self._quarantined else deadline.left_s

    def _settle(self, lease: Lease) -> None:
        """An ended lease without pins: free its bytes, or keep them until its transfer is done."""
        lease._memory = None
        self._leased_bytes -= lease.reserved_bytes
        if lease._done is None:
            self._reuse(lease)
        else:
            self._quarantined.add(lease)
            self._quarantined_bytes += lease.reserved_bytes
            self._wake()  # to look whether it is done

    def _sweep(self) -> None:
        """Free what is done in quarantine. Gives up the lock meanwhile: `done` is foreign code, and may take locks."""
        if self._sweeping or not self._quarantined:
            return
        self._sweeping = True
        candidates = tuple(self._quarantined)
        finished: list[Lease] = []
        self._lock.release()
        try:
            finished.extend(lease for lease in candidates if _is_done(lease))
        finally:
            self._lock.acquire()
            self._sweeping = False
            for lease in finished:
                self._quarantined.remove(lease)
                self._quarantined_bytes -= lease.reserved_bytes
                self._reuse(lease)

    def _reuse(self, lease: Lease) -> None:
        self._free.give(lease._offset, lease.reserved_bytes)
        lease._done = None
        if self._memory is not None and not self._leased_bytes and not self._quarantined:
            _IN_USE.discard(self._memory)
        self._wake()

    def _wake(self) -> None:
        if self._queue:
            self._queue[0].notify()
        self._idle.notify_all()


def _is_done(lease: Lease) -> bool:
    done = lease._done
    try:
        return done is not None and bool(done())
    except (
        Exception
    ):  # whoever needs room is not the one to fail for another's transfer; its bytes stay locked away
        log.exception(
            "the state of a quarantined transfer cannot be told; its %d bytes stay unused", lease.size_bytes
        )
        return False

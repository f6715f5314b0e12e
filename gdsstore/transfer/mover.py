"""Moving the pages of one chunk: memory <-> slots through the engine, in place or through the staging arena.

Knows addresses, offsets and checksums; nothing of the catalog. `load.py` and `save.py` drive it chunk by chunk, so that the
checksums of one chunk are computed while the drive works on the next.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Engine, Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.memory.known import KnownMemory
from gdsstore.memory.views import PageMemory
from gdsstore.observe.counters import Counters
from gdsstore.observe.nvtx import RANGES
from gdsstore.transfer.chunk_counts import ChunkCounts, Moved
from gdsstore.transfer.flight import U64, ChunkGrant, Flight, Placed, Side
from gdsstore.transfer.plan import ChunkPlan, plan_chunk
from gdsstore.transfer.results import PageStatus, Statuses, Unfinished
from gdsstore.transfer.stuck import StuckTransfers
from gdsstore.volume.files import SegmentFiles
from gdsstore.volume.health import VolumeHealth
from gdsstore.waiting import Deadline, pause

log = logging.getLogger("gdsstore.transfer")

POLL_S = 0.0005  # a chunk of 16 MiB takes several milliseconds
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
STALL_S = 5.0


class Mover:
    """Starts and finishes chunks. Thread-safe; a flight belongs to the thread that started it."""

    def __init__(
        self,
        engine: Engine,
        files: SegmentFiles,
        side: Side,
        counters: Counters,
        *,
        moved: Moved | None = None,
        health: Mapping[Op, Sequence[VolumeHealth]] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """`moved`, `health`, `stall_s`: see ChunkCounts."""
        self._engine, self._files, self._side, self._counters = engine, files, side, counters
        self._counts = ChunkCounts(engine.name, counters, moved, health, stall_s)
        self._stuck = StuckTransfers(health, stall_s)

    def start(
        self,
        op: Op,
        memory: PageMemory,
        placed: Placed,
        record_bytes: int,
        deadline: Deadline,
        *,
        wait: bool,
        grant: ChunkGrant | None = None,
        unfinished: list[Unfinished] | None = None,
        first_block: int = 0,
    ) -> Flight | None:
        """Submit a chunk. None where the staging arena is full and `wait` is false: finish an earlier chunk first.

        `record_bytes`: what a page takes on the drive. `first_block`: where that is a part of its record, the block that it begins
        with. `grant` is the flight's from here on; where there is none, it is the
        caller's. Raises DeadlineError where the arena stayed full, or the device did not do its part in time, and EngineError
        where it failed; what may still use the pages' memory then is added to `unfinished`.
        """
        n = len(memory)
        staged = np.flatnonzero(~self.in_place(memory, record_bytes))
        lease = None
        if len(staged):
            try:
                lease = self._side.lease(len(staged) * record_bytes, deadline.left_s if wait else 0.0)
            except DeadlineError:
                if wait:
                    raise
                return None
        address, length = memory.address, memory.length
        if lease is not None:
            address, length = address.copy(), length.copy()
            address[staged, 0] = np.uint64(lease.address) + np.arange(
                len(staged), dtype=np.uint64
            ) * np.uint64(record_bytes)
            length[staged] = 0
            length[staged, 0] = record_bytes
        segments, first, inverse = np.unique(placed.segment, return_index=True, return_inverse=True)
        try:
            pinned = self._files.pin(segments, placed.volume[first], writing=op is Op.WRITE)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        fd = pinned[inverse]
        status = np.zeros(n, np.uint8)
        flight = Flight(
            op,
            memory,
            record_bytes,
            staged,
            address,
            length,
            fd,
            placed.volume,
            placed.file_offset,
            status,
            plan_chunk(fd[:0], placed.file_offset[:0], address[:0], length[:0]),
            lease,
            lambda: self._files.unpin(segments, pinned),
            grant=grant,
            first_block=first_block,
        )
        try:
            self._side.prepare(flight, deadline)
            status[fd < 0] = PageStatus.MISS_SEGMENT if op is Op.READ else PageStatus.FAILED_IO
            if (
                deadline.passed
            ):  # opening a file may have taken that long, and the memory may be somebody else's by now
                raise DeadlineError("no time is left to start moving pages")
            flight.started = time.monotonic()  # what was waited for on the device is no fault of the drive's
            self._submit(flight, np.flatnonzero(fd >= 0), merge=True)
        except BaseException:
            left = self.drop(flight)
            if unfinished is not None:
                unfinished.extend(left)
            raise
        return flight

    def in_place(self, memory: PageMemory, record_bytes: int) -> npt.NDArray[np.bool_]:
        """Which pages the drive reads and writes where they are; the others go through the staging arena. Shape (n,)."""
        return self._side.in_place(memory, record_bytes)

    def _submit(self, flight: Flight, pages: npt.NDArray[np.intp], *, merge: bool) -> None:
        with RANGES.plan:
            plan = plan_chunk(
                flight.fd[pages],
                flight.file_offset[pages],
                flight.address[pages],
                flight.length[pages],
                merge=merge,
                label=flight.cls,
            )
        # Page numbers of the plan are positions in `pages`; the flight's are positions in the chunk.
        flight.plan = ChunkPlan(
            plan.ranges, pages[plan.page], plan.request, plan.within, plan.length, len(flight.memory)
        )
        if len(plan.ranges):
            flight.end_io = RANGES.io(flight.op, plan.ranges)
            flight.transfers.append(self._engine.submit(flight.op, plan.ranges))

    def first_done(self, flights: Sequence[Flight], deadline: Deadline) -> int:
        """Which of several chunks to finish next: one that has ended, or the oldest once the deadline has passed.

        Not simply the oldest: a drive's elevator may serve it last, and meanwhile the drive would run dry.
        """
        while True:
            for number, flight in enumerate(flights):
                if _has_ended(flight):
                    return number
            if deadline.passed:
                return 0
            pause(min(POLL_S, deadline.left_s))

    def any_done(self, flights: Sequence[Flight]) -> bool:
        """Whether one of several chunks has ended."""
        return any(_has_ended(flight) for flight in flights)

    def wait(self, flight: Flight, deadline: Deadline) -> Statuses:
        """Wait for a chunk. Pages that moved whole stay PENDING; the others get their status. Failed ones are tried again
        once, one request a page: an error then hits only the page that it belongs to."""
        for attempt in range(2):
            pages = np.unique(flight.plan.page)
            if len(pages) == 0:
                break
            results = flight.transfers[-1].wait(deadline.left_s)
            whole, errors = flight.plan.moved(results), flight.plan.errors(results)
            failed = pages[~whole[pages]]
            self._counts.add(flight, results)
            if len(failed) == 0 and attempt == 0 and flight.grant is not None:
                flight.grant.moved()
            timed_out = errors[failed] == errno.ETIMEDOUT
            reading = flight.op is Op.READ
            flight.status[failed] = PageStatus.MISS_IO if reading else PageStatus.FAILED_IO
            flight.status[failed[timed_out]] = (
                PageStatus.MISS_DEADLINE if reading else PageStatus.FAILED_DEADLINE
            )
            if not reading:
                flight.status[failed[np.isin(errors[failed], NO_SPACE)]] = PageStatus.FAILED_NO_SPACE
            if len(failed) == 0 or attempt == 1 or deadline.passed or not flight.transfers[-1].done:
                break
            self._counters.add("io_retries", len(failed))
            try:
                self._submit(flight, failed, merge=False)
            except EngineError as error:
                log.error("%d pages could not be tried again: %s", len(failed), error)
                break
            flight.status[failed] = PageStatus.PENDING
        if flight.damaged is not None:
            flight.status[flight.damaged & (flight.status == PageStatus.PENDING)] = PageStatus.FAILED_CHECKSUM
        return flight.status

    def raw_checksums(self, flight: Flight, pages: npt.NDArray[np.intp], deadline: Deadline) -> U64:
        """Raw checksums of some of the chunk's pages, from the memory that the drive saw. Shape (len(pages),).

        Raises DeadlineError, EngineError: see `Side`.
        """
        with RANGES.verify:
            sums = self._side.raw_checksums(flight, pages, deadline)
        if isinstance(flight.memory, KnownMemory):
            flight.damaged = np.zeros(len(flight.memory), np.bool_)
            flight.damaged[pages] = sums != flight.memory.raw[pages]
        return sums

    def scatter(self, flight: Flight, pages: npt.NDArray[np.intp], deadline: Deadline) -> None:
        """Copy those of `pages` that were staged into the caller's memory. Raises as `raw_checksums` does."""
        with RANGES.scatter:
            self._side.scatter(flight, pages, deadline)

    def bring(
        self,
        address: U64,
        memory: PageMemory,
        record_bytes: int,
        deadline: Deadline,
        sums: U64 | None = None,
        first_block: int = 0,
    ) -> Unfinished | None:
        """See `Side.bring`."""
        with RANGES.scatter:
            return self._side.bring(address, memory, record_bytes, deadline, sums, first_block)

    def drop(self, flight: Flight, after: Callable[[], None] = lambda: None) -> list[Unfinished]:
        """End a flight: give its staging and descriptors back, or keep them until the engine has let go of them.

        `after` is called when that is so, now or in a later `sweep`. Returns what is not done.
        """

        def let_go() -> None:
            flight.unpin()
            if flight.grant is not None:
                flight.grant.done()
            after()

        flight.end_io()
        unfinished = flight.unfinished
        if not unfinished:
            if flight.lease is not None:
                flight.lease.release()
            let_go()
            return []
        if flight.grant is not None:
            flight.grant.late()
        for transfer in flight.transfers:
            try:
                transfer.wait(0.0)  # what has not begun does not begin any more
            except Exception:  # the others are to be given up all the same; this one is kept until it is done
                log.exception("an engine could not give a transfer up")
        if flight.lease is not None:
            flight.lease.quarantine(lambda: all(work.done for work in unfinished))
        self._counters.add("stuck_transfers", len(unfinished))
        self._stuck.add(flight, unfinished, let_go)
        return unfinished

    def sweep(self) -> int:
        """Let go of what belonged to stuck transfers that have ended. Returns how many are still stuck."""
        return self._stuck.sweep()


def _has_ended(flight: Flight) -> bool:
    return not flight.transfers or flight.transfers[-1].done

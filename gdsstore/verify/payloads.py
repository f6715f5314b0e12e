"""Reading every record of a segment and comparing it with its checksum."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.definition import finish, seeds
from gdsstore.config import Config
from gdsstore.engines.base import Engine, Op
from gdsstore.errors import DeadlineError
from gdsstore.memory.arena import Arena, Lease
from gdsstore.memory.views import PageMemory
from gdsstore.moving import make_arena
from gdsstore.observe.counters import Counters
from gdsstore.transfer.flight import Flight, Placed
from gdsstore.transfer.host_side import HostSide
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.plan import chunks
from gdsstore.transfer.results import PageStatus, Statuses
from gdsstore.verify.agreement import namespaces_of
from gdsstore.verify.result import Damage, Kind
from gdsstore.verify.table import Table
from gdsstore.volume.files import SegmentFiles
from gdsstore.volume.format import Entries
from gdsstore.volume.volume import Volume
from gdsstore.waiting import Deadline

DEPTH = 3  # chunks under way: one being checked, the others keep the drive busy meanwhile
OPEN_FILES = 2  # segments are read one after the other

FAULTS = {
    PageStatus.MISS_CHECKSUM: (Kind.PAYLOAD, "the payload does not have its checksum"),
    PageStatus.MISS_IO: (Kind.UNREADABLE, "the drive answers with an error, or with fewer bytes"),
    PageStatus.MISS_SEGMENT: (Kind.UNREADABLE, "the file cannot be opened for its payload"),
    PageStatus.MISS_DEADLINE: (Kind.UNREADABLE, "the drive did not answer in time"),
}

I64 = npt.NDArray[np.int64]
Advance = Callable[[int], None]


class PayloadReader:
    """Reads through an engine, with direct I/O where the volumes do it. For one thread. Closes the engine with itself."""

    def __init__(self, engine: Engine, volumes: Sequence[Volume], segment_bytes: int, config: Config) -> None:
        self._engine, self._volumes, self._config = engine, volumes, config
        self._files = SegmentFiles(engine, volumes, segment_bytes, OPEN_FILES)
        self._mover = Mover(engine, self._files, HostSide(self._staging, 4096, zero_copy=True), Counters())
        self._arena: Arena | None = None

    def check(self, table: Table, volume: Volume, slots: I64, advance: Advance) -> Statuses:
        """For each of these slots, whose entries are live: LOADED, MISS_CHECKSUM, MISS_IO, MISS_DEADLINE or MISS_SEGMENT.

        `advance` is called with the offset in the file up to which records have been checked. Raises DeadlineError where the
        drive holds on to all of the memory.
        """
        geometry = table.superblock.geometry
        record = geometry.slot_bytes
        entries = table.entries[slots]
        seed = _seeds(entries)
        offset = geometry.slot_offset(slots)
        placed = Placed(
            np.full(len(slots), table.superblock.segment_id, np.uint32),
            np.full(len(slots), volume.index, np.int64),
            offset,
        )
        status = np.full(len(slots), PageStatus.PENDING, np.uint8)
        flights: deque[tuple[slice, Flight, Lease, Deadline]] = deque()

        def finish_oldest() -> None:
            part, flight, lease, deadline = flights.popleft()
            try:
                outcome = self._mover.wait(flight, deadline)
                read = np.flatnonzero(outcome == PageStatus.PENDING)
                got = finish(self._mover.raw_checksums(flight, read, deadline), seed[part][read])
                right = got == entries["checksum"][part][read]
                outcome[read] = np.where(right, PageStatus.LOADED, PageStatus.MISS_CHECKSUM)
                status[part] = outcome
            finally:
                self._drop(flight, lease)
            advance(int(offset[part.stop - 1]) + record)

        try:
            for part in chunks(np.full(len(slots), record, np.int64), self._config.chunk_bytes, taper=True):
                nbytes = (part.stop - part.start) * record
                lease = None
                while flights and lease is None:  # a drive that hangs may hold on to a part of the memory
                    lease = None if len(flights) == DEPTH else self._lease(nbytes, record, wait=False)
                    if lease is None:
                        finish_oldest()
                lease = lease or self._lease(nbytes, record, wait=True)
                assert lease is not None  # only without `wait`
                deadline = Deadline(self._config.io_deadline_s)
                flights.append(
                    (part, self._start(lease, placed.take(part), record, deadline), lease, deadline)
                )
            while flights:
                finish_oldest()
        finally:
            for _, flight, lease, _ in flights:  # only after an error
                self._drop(flight, lease)
        return status

    def close(self) -> None:
        """Wait for what is under way, a while, then let go; whatever one step raises, the others happen."""
        with contextlib.ExitStack() as steps:
            if self._arena is not None:
                steps.callback(self._arena.close, self._config.io_deadline_s)
            steps.callback(self._files.close)
            steps.callback(self._engine.close, self._config.io_deadline_s)
            steps.callback(self._mover.sweep)

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, lease: Lease, placed: Placed, record: int, deadline: Deadline) -> Flight:
        count = len(placed.segment)
        address = np.uint64(lease.address) + np.arange(count, dtype=np.uint64) * np.uint64(record)
        memory = PageMemory(address.reshape(-1, 1), np.full((count, 1), record, np.int64), lease)
        try:
            flight = self._mover.start(Op.READ, memory, placed, record, deadline, wait=True)
        except BaseException:
            lease.release()
            raise
        assert flight is not None  # only without `wait`
        return flight

    def _drop(self, flight: Flight, lease: Lease) -> None:
        unfinished = self._mover.drop(flight)
        if unfinished:  # the drive may still write into these bytes
            lease.quarantine(lambda: all(transfer.done for transfer in unfinished))
        else:
            lease.release()
        self._mover.sweep()

    def _lease(self, nbytes: int, record: int, *, wait: bool) -> Lease | None:
        try:
            return self._room(record).lease(nbytes, self._config.io_deadline_s if wait else 0.0)
        except DeadlineError as error:
            if not wait:
                return None
            raise DeadlineError(
                "the drive holds on to all memory that was given to it for reading; look at its health, then verify again",
                deadline_s=self._config.io_deadline_s,
            ) from error

    def _room(self, record: int) -> Arena:
        """Memory for `DEPTH` chunks; larger records than there were so far get a larger one."""
        wanted = DEPTH * max(self._config.chunk_bytes, record)
        if self._arena is not None and self._arena.size_bytes < wanted:
            self._arena.close(self._config.io_deadline_s)
            self._arena = None
        if self._arena is None:
            self._arena = make_arena(self._config, wanted, self._volumes[0])
        return self._arena

    def _staging(self) -> Arena:
        return self._room(0)


def payload_damage(table: Table, slot: int, status: PageStatus) -> Damage:
    """What is wrong with a slot for which `PayloadReader.check` gave a status other than LOADED."""
    kind, what = FAULTS[status]
    segment_id = table.superblock.segment_id
    # The table of that file was read just now, so that one that cannot be opened is this process's trouble.
    unsure = status in (PageStatus.MISS_DEADLINE, PageStatus.MISS_SEGMENT)
    return Damage(table.file, segment_id, kind, what, slot, table.key(slot), unsure=unsure)


def _seeds(entries: Entries) -> npt.NDArray[np.uint64]:
    out = np.zeros(len(entries), np.uint64)
    digests, which = namespaces_of(entries)
    for number, digest in enumerate(digests):
        mine = entries[which == number]
        out[which == number] = seeds(
            np.ascontiguousarray(mine["key"]),
            digest,
            mine["generation"].astype(np.uint64),
            mine["payload_bytes"].astype(np.int64),
        )
    return out

"""From payloads on the drive to pages that are visible: slots, table entries, catalog; in that order, so that a crash in between
loses pages, never truth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.allocate import SegmentPool
from gdsstore.catalog.heat import Heat
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.owned import SlotRun
from gdsstore.catalog.records import Run, SegmentState
from gdsstore.checksum.definition import finish, seeds
from gdsstore.errors import GdsStoreError, from_os_error
from gdsstore.memory.views import PageMemory
from gdsstore.sequence import Sequencer
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import U64, Ints, Placed
from gdsstore.transfer.mover import NO_SPACE
from gdsstore.transfer.results import PageStatus, Statuses
from gdsstore.volume.format import ENTRY, FLAG_STORED, Entries, seal_entries
from gdsstore.volume.volume import write_entries
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The pages of one call that are not stored yet; arrays of shape (n,). `at`: their positions in the call."""

    at: Ints
    keys: npt.NDArray[np.uint8]
    index: U64
    tag: U64
    namespace_digest: bytes
    memory: PageMemory
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Pages of a job, by their positions in it, and the slots that they go to, in `runs` one behind the other. Shapes (n,)."""

    pages: Ints
    runs: Sequence[SlotRun]
    placed: Placed
    slot: npt.NDArray[np.int64]
    generation: U64

    @classmethod
    def of(cls, pages: Ints, runs: Sequence[SlotRun]) -> Slots:
        """One slot a page; at least one."""
        counts = [run.count for run in runs]
        slot = np.concatenate([np.arange(run.first, run.first + run.count, dtype=np.int64) for run in runs])
        offset = np.concatenate(
            [run.owned.geometry.slot_offset(np.arange(run.first, run.first + run.count)) for run in runs]
        )
        segment = np.repeat(np.array([run.owned.segment_id for run in runs], np.uint32), counts)
        volume = np.repeat(np.array([run.owned.volume.index for run in runs], np.int64), counts)
        generation = np.repeat(np.array([run.owned.row.generation for run in runs], np.uint64), counts)
        return cls(pages, runs, Placed(segment, volume, offset), slot, generation)

    def runs_of(self, positions: Ints) -> list[SlotRun]:
        """The runs that these of the pages, by position here and in order, have slots of."""
        stops = np.cumsum([run.count for run in self.runs])
        return [self.runs[i] for i in np.unique(np.searchsorted(stops, positions, side="right")).tolist()]


class Commits:
    """Slots and commits for the saves of one store. Thread-safe."""

    def __init__(
        self,
        pool: SegmentPool,
        catalog: Catalog,
        heat: Heat,
        sequencer: Sequencer,
        salt: int,
        *,
        durable: bool,
    ) -> None:
        """`durable`: pages become visible only when they are."""
        self._pool, self._catalog, self._heat = pool, catalog, heat
        self._salt, self._sequencer, self.durable = salt, sequencer, durable

    def reserve(
        self, slot_bytes: int, count: int, deadline: Deadline, admission: Admission
    ) -> tuple[Sequence[SlotRun], PageStatus]:
        """Slots for up to `count` pages, and what becomes of the pages that got none."""
        try:
            runs = self._pool.reserve(slot_bytes, count, deadline)
        except GdsStoreError as error:
            log.error("no room for a save: %s", error)
            return [], _failure(error)
        except Exception:  # of the thread that was to get a segment
            log.exception("no room for a save")
            return [], PageStatus.FAILED_IO
        if deadline.passed:
            return runs, PageStatus.FAILED_DEADLINE
        return runs, PageStatus.FAILED_NO_SPACE if admission.some_writable else PageStatus.FAILED_VOLUME_SICK

    def hold(self, runs: Sequence[SlotRun]) -> None:
        """Keep the segments of these runs for as long as the drive may write to them; `let_go` ends that."""
        for run in runs:
            self._pool.hold(run)

    def let_go(self, runs: Sequence[SlotRun], *, failed: bool) -> None:
        """Runs were committed or given up, or their I/O has ended. After a failed write their segments get no further ones."""
        for run in runs:
            self._pool.finish(run, failed=failed)

    def enter(self, job: SaveJob, slots: Slots, raw: U64, outcome: Statuses, status: Statuses) -> list[Run]:
        """Write the table entries of those pages whose `outcome` is PENDING; the runs that may be committed.

        `raw`: the pages' raw checksums. `outcome` (n,) becomes the `status` of the pages that failed.
        """
        mine = slots.pages
        good = outcome == PageStatus.PENDING
        payload = job.memory.page_bytes[mine]
        seed = seeds(job.keys[mine], job.namespace_digest, slots.generation, payload)
        entries = np.zeros(len(mine), ENTRY)
        entries["key"] = job.keys[mine]
        entries["namespace"] = np.frombuffer(job.namespace_digest, np.uint8)
        entries["checksum"], entries["generation"] = finish(raw, seed), slots.generation
        entries["segment_id"], entries["slot"] = slots.placed.segment, slots.slot
        entries["payload_bytes"], entries["flags"] = payload, FLAG_STORED
        entries["sequence"] = self._sequencer.take(len(mine)) + np.arange(len(mine))
        runs: list[Run] = []
        start = 0
        for run in slots.runs:
            stop = start + run.count
            try:
                self._write_table(run, entries[start:stop], good[start:stop])
            except OSError as error:
                path = run.owned.volume.segment_path(run.owned.segment_id)
                log.error("record table of %s: %s", path, error)
                outcome[start:stop] = _failure(from_os_error(error, "record table"))
                good[start:stop] = False
            runs += _runs_of(run, start, good, job.index[mine], job.tag[mine], entries)
            start = stop
        status[job.at[mine[~good]]] = outcome[~good]
        return runs

    def _write_table(self, run: SlotRun, entries: Entries, good: npt.NDArray[np.bool_]) -> None:
        seal_entries(entries, self._salt)
        if not good.all():
            entries = entries.copy()
            entries[~good] = np.zeros(1, ENTRY)  # a slot whose payload did not arrive has no entry
        with self._pool.writing(run) as table_fd:
            write_entries(table_fd, run.first, entries)

    def commit(self, job: SaveJob, written: Sequence[tuple[Slots, list[Run]]], status: Statuses) -> None:
        """Make visible what was entered, in one transaction; what is PENDING of it becomes SAVED, or fails."""
        try:
            if self.durable:
                self._pool.sync()
            pages = sum(len(slots.pages) for slots, _ in written)
            with self._catalog.write(pages=pages) as txn:
                for slots, runs in written:
                    failed = any_failed(job, slots, status)
                    for run in slots.runs:
                        self._advance(txn, run, failed=failed)
                    self._catalog.commit(txn, job.namespace_digest, runs)
        except GdsStoreError as error:
            log.error("a save could not be committed: %s", error)
            failure = _failure(error)
            for slots, _ in written:
                at = job.at[slots.pages]
                status[at[status[at] == PageStatus.PENDING]] = failure
            return
        for slots, _ in written:
            at = job.at[slots.pages]
            saved = status[at] == PageStatus.PENDING
            status[at[saved]] = PageStatus.SAVED
            self._heat.touch(slots.placed.segment[saved], slots.slot[saved].astype(np.uint32))

    def _advance(self, txn: object, run: SlotRun, *, failed: bool) -> None:
        row = self._catalog.segment(txn, run.owned.segment_id)
        if row is None or row.generation != run.owned.row.generation or row.state is SegmentState.LOST:
            raise GdsStoreError("a segment was taken from its owner", segment=run.owned.segment_id)
        filled = max(row.filled, run.first + run.count)
        state = SegmentState.SEALED if failed or filled >= row.slot_count else row.state
        self._catalog.put_segment(txn, row.with_(filled=filled, state=state))


def any_failed(job: SaveJob, slots: Slots, status: Statuses) -> bool:
    """Whether a page of these failed, and not by the caller's own wish."""
    mine = status[job.at[slots.pages]]
    return bool(((mine >= PageStatus.MISS_ABSENT) & (mine != PageStatus.FAILED_CANCELLED)).any())


def _failure(error: GdsStoreError) -> PageStatus:
    return PageStatus.FAILED_NO_SPACE if error.context.get("errno") in NO_SPACE else PageStatus.FAILED_IO


def _runs_of(
    run: SlotRun,
    start: int,
    good: npt.NDArray[np.bool_],
    index: U64,
    tag: U64,
    entries: Entries,
) -> list[Run]:
    """The good pages of a slot run, cut where a bad one lies between."""
    places = start + np.flatnonzero(good[start : start + run.count])
    if len(places) == 0:
        return []
    return [
        Run(
            run.owned.segment_id,
            run.first + int(part[0]) - start,
            run.owned.row.generation,
            index[part],
            tag[part],
            entries["checksum"][part],
            entries["payload_bytes"][part],
        )
        for part in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    ]

"""From payloads on the drive to pages that are visible: slots, table entries, catalog; in that order, so that a crash in between
loses pages, never truth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.allocate import SegmentPool
from gdsstore.catalog.heat import Heat
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.owned import SlotRun
from gdsstore.catalog.records import Run, SegmentState
from gdsstore.catalog.table_writes import TableWrite, TableWrites
from gdsstore.catalog.timed_writes import TimedWrites
from gdsstore.checksum.definition import finish, seeds
from gdsstore.errors import DeadlineError, GdsStoreError
from gdsstore.memory.views import PageMemory
from gdsstore.sequence import Sequencer
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import U64, Ints, Placed
from gdsstore.transfer.last_steps import LastSteps
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

    def parts(self) -> list[tuple[SlotRun, slice]]:
        """Each run, and where its pages are in these arrays."""
        stops = np.cumsum([run.count for run in self.runs]).tolist()
        return [(run, slice(stop - run.count, stop)) for run, stop in zip(self.runs, stops, strict=True)]

    def runs_of(self, positions: Ints) -> list[SlotRun]:
        """The runs that these of the pages, by position here and in order, have slots of."""
        stops = np.cumsum([run.count for run in self.runs])
        return [self.runs[i] for i in np.unique(np.searchsorted(stops, positions, side="right")).tolist()]


@dataclass(frozen=True, slots=True)
class Entering:
    """Table entries that are being written. Shapes (n,), as in `slots`. `good`: the pages that have one."""

    slots: Slots
    entries: Entries
    good: npt.NDArray[np.bool_]
    writes: TableWrites

    @property
    def done(self) -> bool:
        return self.writes.done


Written = Sequence[tuple[Slots, list[Run]]]
"""What was entered: slots, and those runs of them that may be committed."""


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
        self._writes = TimedWrites(catalog, pool.calls)

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

    def enter(self, job: SaveJob, slots: Slots, raw: U64, outcome: Statuses, status: Statuses) -> Entering:
        """Begin to write the table entries of those pages whose `outcome` is PENDING.

        `raw`: the pages' raw checksums. `outcome` (n,) becomes the `status` of the pages that failed.
        """
        mine = slots.pages
        good = outcome == PageStatus.PENDING
        status[job.at[mine[~good]]] = outcome[~good]
        payload = job.memory.page_bytes[mine]
        seed = seeds(job.keys[mine], job.namespace_digest, slots.generation, payload)
        entries = np.zeros(len(mine), ENTRY)
        entries["key"] = job.keys[mine]
        entries["namespace"] = np.frombuffer(job.namespace_digest, np.uint8)
        entries["checksum"], entries["generation"] = finish(raw, seed), slots.generation
        entries["segment_id"], entries["slot"] = slots.placed.segment, slots.slot
        entries["payload_bytes"], entries["flags"] = payload, FLAG_STORED
        entries["sequence"] = self._sequencer.take(len(mine)) + np.arange(len(mine))
        writes = [
            TableWrite(run, partial(self._write_table, run, entries[part], good[part].copy()))
            for run, part in slots.parts()
        ]
        return Entering(slots, entries, good, TableWrites(self._pool, writes))

    def entered(self, job: SaveJob, entering: Entering, status: Statuses, deadline: Deadline) -> list[Run]:
        """Wait for the table entries. The runs that may be committed; the pages of the others get their `status`."""
        slots, good = entering.slots, entering.good
        index, tag = job.index[slots.pages], job.tag[slots.pages]
        runs: list[Run] = []
        for write, (run, part) in zip(entering.writes.wait(deadline), slots.parts(), strict=True):
            error = write.error
            if error is not None:
                path = run.owned.volume.segment_path(run.owned.segment_id)
                log.error("record table of %s: %s", path, error)
                status[job.at[slots.pages[part][good[part]]]] = _failure(error)
                good[part] = False
            runs += _runs_of(run, part.start, good, index, tag, entering.entries)
        return runs

    def _write_table(
        self, run: SlotRun, entries: Entries, good: npt.NDArray[np.bool_], table_fd: int
    ) -> None:
        seal_entries(entries, self._salt)
        if not good.all():
            entries = entries.copy()
            entries[~good] = np.zeros(1, ENTRY)  # a slot whose payload did not arrive has no entry
        write_entries(table_fd, run.first, entries)

    def commit(self, job: SaveJob, written: Written, status: Statuses, steps: LastSteps) -> None:
        """Make visible what was entered, in one transaction; what is PENDING of it becomes SAVED, or fails."""
        try:
            if self.durable:
                written = self._durable(job, written, status, steps.durable)
            self._make_visible(job, written, status, steps.visible)
        except GdsStoreError as error:
            log.error("a save could not be committed: %s", error)
            for slots, _ in written:
                at = job.at[slots.pages]
                status[at[status[at] == PageStatus.PENDING]] = _failure(error)
            return
        for slots, _ in written:
            at = job.at[slots.pages]
            saved = status[at] == PageStatus.PENDING
            status[at[saved]] = PageStatus.SAVED
            self._heat.touch(slots.placed.segment[saved], slots.slot[saved].astype(np.uint32))

    def _make_visible(self, job: SaveJob, written: Written, status: Statuses, deadline: Deadline) -> None:
        slot_runs = [run for slots, _ in written for run in slots.runs]
        failed = [any_failed(job, slots, status) for slots, _ in written]
        taken: set[int] = set()  # segments that are not ours any more: the file was lost, say

        def work(txn: object) -> None:
            for (slots, runs), bad in zip(written, failed, strict=True):
                taken.update(
                    run.owned.segment_id for run in slots.runs if not self._advance(txn, run, failed=bad)
                )
                self._catalog.commit(
                    txn, job.namespace_digest, [run for run in runs if run.segment not in taken]
                )

        def late(call: Future[None]) -> None:
            self.hold(slot_runs)  # or pages might appear in slots that somebody else has got meanwhile
            call.add_done_callback(lambda _: self.let_go(slot_runs, failed=False))

        self._writes.write(work, sum(len(slots.pages) for slots, _ in written), deadline, late)
        for segment_id in taken:
            log.error("segment %d was taken from its owner: its pages are not saved", segment_id)
            _fail(job, written, segment_id, status, PageStatus.FAILED_IO)

    def _durable(self, job: SaveJob, written: Written, status: Statuses, deadline: Deadline) -> Written:
        """Those of the runs that are on the drive for good; the pages of the others get their `status`."""
        wanted = {run.segment for _, runs in written for run in runs}
        segments = {run.owned for slots, _ in written for run in slots.runs}
        failures = self._pool.sync_segments(
            [each for each in segments if each.segment_id in wanted], deadline
        )
        lost = set()
        for segment, error in failures.items():
            log.error("segment %d: %s", segment.segment_id, error)
            lost.add(segment.segment_id)
            _fail(job, written, segment.segment_id, status, _failure(error))
        return [(slots, [run for run in runs if run.segment not in lost]) for slots, runs in written]

    def _advance(self, txn: object, run: SlotRun, *, failed: bool) -> bool:
        """Count a run's slots as used. False where its segment was taken from us."""
        row = self._catalog.segment(txn, run.owned.segment_id)
        if row is None or row.generation != run.owned.row.generation or row.state is SegmentState.LOST:
            return False
        filled = max(row.filled, run.first + run.count)
        state = SegmentState.SEALED if failed or filled >= row.slot_count else row.state
        self._catalog.put_segment(txn, row.with_(filled=filled, state=state))
        return True


def any_failed(job: SaveJob, slots: Slots, status: Statuses) -> bool:
    """Whether a page of these failed, and not by the caller's own wish."""
    mine = status[job.at[slots.pages]]
    return bool(((mine >= PageStatus.MISS_ABSENT) & (mine != PageStatus.FAILED_CANCELLED)).any())


def _fail(job: SaveJob, written: Written, segment_id: int, status: Statuses, failure: PageStatus) -> None:
    for slots, _ in written:
        at = job.at[slots.pages[slots.placed.segment == segment_id]]
        status[at[status[at] == PageStatus.PENDING]] = failure


def _failure(error: GdsStoreError) -> PageStatus:
    if isinstance(error, DeadlineError):
        return PageStatus.FAILED_DEADLINE
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

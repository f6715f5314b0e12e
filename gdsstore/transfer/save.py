"""Saving pages: slots, payload, table entries, catalog; in that order, so that a crash in between loses pages, never truth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.allocate import SegmentPool, SlotRun
from gdsstore.catalog.heat import Heat
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.records import Run, SegmentState
from gdsstore.checksum.definition import finish, seeds
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError, GdsStoreError, from_os_error
from gdsstore.memory.views import PageMemory
from gdsstore.sequence import Sequencer
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import Flight, Placed
from gdsstore.transfer.mover import NO_SPACE, Mover
from gdsstore.transfer.plan import AHEAD_CHUNKS, chunks
from gdsstore.transfer.results import PageStatus, SaveResult, Statuses, Unfinished
from gdsstore.volume.format import ENTRY, FLAG_STORED, Entries, seal_entries
from gdsstore.volume.volume import write_entries
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")

EARLY_COMMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The pages of one call that are not stored yet; arrays of shape (n,). `at`: their positions in the call."""

    at: npt.NDArray[np.intp]
    keys: npt.NDArray[np.uint8]
    index: npt.NDArray[np.uint64]
    tag: npt.NDArray[np.uint64]
    namespace_digest: bytes
    memory: PageMemory
    record_bytes: int


@dataclass(slots=True)
class _Part:
    """A chunk under way: positions in the job, and the slots that they go to."""

    pages: npt.NDArray[np.intp]
    runs: Sequence[SlotRun]
    segment: npt.NDArray[np.uint32]
    slot: npt.NDArray[np.int64]
    generation: npt.NDArray[np.uint64]
    flight: Flight
    raw: npt.NDArray[np.uint64]  # raw checksums
    trusted: bool  # they were computed in time: later the caller may have put something else into the memory


class Saver:
    """Saves for one store. Thread-safe."""

    def __init__(
        self,
        mover: Mover,
        pool: SegmentPool,
        catalog: Catalog,
        heat: Heat,
        sequencer: Sequencer,
        salt: int,
        chunk_bytes: int,
        sync_commits: bool,
    ) -> None:
        self._mover, self._pool, self._catalog, self._heat = mover, pool, catalog, heat
        self._salt, self._chunk_bytes, self._sync_commits = salt, chunk_bytes, sync_commits
        self._sequencer = sequencer

    def save(self, job: SaveJob, status: Statuses, deadline: Deadline, admission: Admission) -> SaveResult:
        """Write the job's pages. `status` (one a key of the call) is filled in and returned. Does not raise."""
        parts: list[_Part] = []
        written: list[tuple[_Part, list[Run]]] = []
        unfinished: list[Unfinished] = []
        committed, enough = 0, EARLY_COMMIT_BYTES // job.record_bytes

        def finish_one() -> None:
            part = parts.pop(self._mover.first_done([part.flight for part in parts], deadline))
            written.append((part, []))
            try:
                written[-1][1].extend(self._finish(job, part, status, deadline))
            finally:
                unfinished.extend(self._drop(part))

        try:
            for cut in chunks(
                np.full(len(job.at), job.record_bytes, np.int64), self._chunk_bytes, taper=False
            ):
                pages = np.arange(cut.start, cut.stop)
                if admission.stopping:
                    status[job.at[cut.start :]] = PageStatus.FAILED_CANCELLED
                    break
                runs, refused = self._reserve(job.record_bytes, len(pages), deadline, admission)
                room = sum(run.count for run in runs)
                part = None
                if room:
                    part = self._start(
                        job, pages[:room], runs, status, deadline, admission, parts, finish_one, unfinished
                    )
                if part is not None:
                    parts.append(part)
                if (
                    sum(len(each.pages) for each in parts) * job.record_bytes
                    >= AHEAD_CHUNKS * self._chunk_bytes
                ):
                    finish_one()
                if room < len(pages):
                    status[job.at[cut.start + room :]] = refused
                    break
            while parts:
                waiting = written[committed:]
                early = sum(len(part.pages) for part, _ in waiting) >= enough and not self._sync_commits
                if early and not self._mover.any_done([part.flight for part in parts]):
                    self._commit(job, waiting, status)  # the drive is busy, and less is left to do at the end
                    committed = len(written)
                finish_one()
            self._commit(job, written[committed:], status)
        except Exception:  # an exception could not say which memory the drive still reads from; a result does
            log.exception("a save failed")
            mine = status[job.at]
            status[job.at[mine == PageStatus.PENDING]] = PageStatus.FAILED_IO
        finally:
            for part in parts:  # only after an unexpected error
                unfinished.extend(self._drop(part))
            for part in [*parts, *(part for part, _ in written)]:
                self._let_go(part.runs, bool((status[job.at[part.pages]] >= PageStatus.MISS_ABSENT).any()))
        return SaveResult(status, unfinished)

    def _reserve(
        self, slot_bytes: int, count: int, deadline: Deadline, admission: Admission
    ) -> tuple[Sequence[SlotRun], PageStatus]:
        """Slots for up to `count` pages, and what becomes of the pages that got none."""
        try:
            runs = self._pool.reserve(slot_bytes, count, deadline)
        except GdsStoreError as error:
            log.error("no room for a save: %s", error)
            return [], _failure(error)
        if deadline.passed:
            return runs, PageStatus.FAILED_DEADLINE
        return runs, PageStatus.FAILED_NO_SPACE if admission.some_writable else PageStatus.FAILED_VOLUME_SICK

    def _drop(self, part: _Part) -> list[Unfinished]:
        """Give a chunk's staging back. Its segments stay ours while the drive may still write to them."""
        for run in part.runs:
            self._pool.hold(run)
        return self._mover.drop(part.flight, partial(self._let_go, part.runs, False))

    def _let_go(self, runs: Sequence[SlotRun], failed: bool) -> None:
        for run in runs:
            self._pool.finish(run, failed=failed)

    def _start(
        self,
        job: SaveJob,
        pages: npt.NDArray[np.intp],
        runs: Sequence[SlotRun],
        status: Statuses,
        deadline: Deadline,
        admission: Admission,
        parts: Sequence[_Part],
        finish_one: Callable[[], None],
        unfinished: list[Unfinished],
    ) -> _Part | None:
        """Submit one chunk; None where it failed as a whole (its status is set then, and its slots are given back)."""
        segment = np.concatenate([np.full(run.count, run.owned.segment_id, np.uint32) for run in runs])
        volume = np.concatenate([np.full(run.count, run.owned.volume.index, np.int64) for run in runs])
        slot = np.concatenate([np.arange(run.first, run.first + run.count, dtype=np.int64) for run in runs])
        offset = np.concatenate(
            [run.owned.geometry.slot_offset(np.arange(run.first, run.first + run.count)) for run in runs]
        )
        generation = np.concatenate([np.full(run.count, run.owned.row.generation, np.uint64) for run in runs])
        placed = Placed(segment, volume, offset)
        flight = grant = None
        failure = PageStatus.FAILED_DEADLINE
        try:
            while flight is None and not deadline.passed and not admission.stopping:
                left_s = 0.0 if parts else deadline.left_s
                grant = grant or admission.enter(volume, job.record_bytes, left_s)
                if grant is not None:
                    flight = self._mover.start(
                        Op.WRITE,
                        job.memory.take(pages),
                        placed,
                        job.record_bytes,
                        deadline,
                        wait=not parts,
                        grant=grant,
                        unfinished=unfinished,
                    )
                if flight is None and parts:
                    finish_one()
        except DeadlineError:
            pass
        except EngineError as error:
            log.error("a save failed: %s", error)
            failure = PageStatus.FAILED_IO
        except BaseException:
            self._let_go(runs, failed=False)
            raise
        finally:
            if grant is not None and flight is None:
                grant.done()
        if flight is None:
            status[job.at[pages]] = PageStatus.FAILED_CANCELLED if admission.stopping else failure
            self._let_go(runs, failed=failure is PageStatus.FAILED_IO)
            return None
        # While the drive writes: nobody may change the memory of a save under way, so it does not matter when we read it.
        try:
            raw, trusted = self._mover.raw_checksums(flight, np.arange(len(pages)), deadline), True
        except GdsStoreError as error:
            log.error("the checksums of a save could not be computed: %s", error)
            raw, trusted = np.zeros(len(pages), np.uint64), False
        trusted = trusted and not deadline.passed
        return _Part(pages, runs, segment, slot, generation, flight, raw, trusted)

    def _finish(self, job: SaveJob, part: _Part, status: Statuses, deadline: Deadline) -> list[Run]:
        """Wait for a chunk's payload and write its table entries; the runs that may be committed."""
        mine = part.pages
        outcome = self._mover.wait(part.flight, deadline)
        if not part.trusted:
            late = PageStatus.FAILED_DEADLINE if deadline.passed else PageStatus.FAILED_IO
            outcome[outcome == PageStatus.PENDING] = late
        good = outcome == PageStatus.PENDING
        payload = job.memory.page_bytes[mine]
        seed = seeds(job.keys[mine], job.namespace_digest, part.generation, payload)
        checksum = finish(part.raw, seed)
        entries = np.zeros(len(mine), ENTRY)
        entries["key"] = job.keys[mine]
        entries["namespace"] = np.frombuffer(job.namespace_digest, np.uint8)
        entries["checksum"], entries["generation"], entries["slot"] = checksum, part.generation, part.slot
        entries["payload_bytes"], entries["flags"] = payload, FLAG_STORED
        entries["sequence"] = self._sequencer.take(len(mine)) + np.arange(len(mine))
        runs: list[Run] = []
        start = 0
        for run in part.runs:
            stop = start + run.count
            entries["segment_id"][start:stop] = run.owned.segment_id
            try:
                self._write_table(run, entries[start:stop], good[start:stop])
            except OSError as error:
                log.error(
                    "record table of %s: %s", run.owned.volume.segment_path(run.owned.segment_id), error
                )
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
        try:
            write_entries(run.owned.table_fd, run.first, entries)
        finally:
            self._pool.mark_dirty(run)  # not before: a sync in between would count for what it did not cover

    def _commit(self, job: SaveJob, written: Sequence[tuple[_Part, list[Run]]], status: Statuses) -> None:
        """Make visible what was written, in one transaction."""
        try:
            if self._sync_commits:
                self._pool.sync()
            pages = sum(len(part.pages) for part, _ in written)
            with self._catalog.write(pages=pages) as txn:
                for part, runs in written:
                    failed = bool((status[job.at[part.pages]] >= PageStatus.MISS_ABSENT).any())
                    for run in part.runs:
                        self._advance(txn, run, failed)
                    self._catalog.commit(txn, job.namespace_digest, runs)
        except GdsStoreError as error:
            log.error("a save could not be committed: %s", error)
            failure = _failure(error)
            for part, _ in written:
                at = job.at[part.pages]
                pending = at[status[at] == PageStatus.PENDING]
                status[pending] = failure
            return
        for part, _ in written:
            at = job.at[part.pages]
            saved = status[at] == PageStatus.PENDING
            status[at[saved]] = PageStatus.SAVED
            self._heat.touch(part.segment[saved], part.slot[saved].astype(np.uint32))

    def _advance(self, txn: object, run: SlotRun, failed: bool) -> None:
        row = self._catalog.segment(txn, run.owned.segment_id)
        if row is None or row.generation != run.owned.row.generation or row.state is SegmentState.LOST:
            raise GdsStoreError("a segment was taken from its owner", segment=run.owned.segment_id)
        filled = max(row.filled, run.first + run.count)
        state = SegmentState.SEALED if failed or filled >= row.slot_count else row.state
        self._catalog.put_segment(txn, row.with_(filled=filled, state=state))


def _failure(error: GdsStoreError) -> PageStatus:
    return PageStatus.FAILED_NO_SPACE if error.context.get("errno") in NO_SPACE else PageStatus.FAILED_IO


def _runs_of(
    run: SlotRun,
    start: int,
    good: npt.NDArray[np.bool_],
    index: npt.NDArray[np.uint64],
    tag: npt.NDArray[np.uint64],
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

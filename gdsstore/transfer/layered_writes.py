"""A layer-wise save: parts of records go to their slots as the forward computes them, and the pages are committed at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from gdsstore.catalog.owned import SlotRun
from gdsstore.engines.base import Op
from gdsstore.layout import ByteRange
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.commit import Commits, SaveJob, Slots, any_failed
from gdsstore.transfer.flight import Flight, Ints
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.last_steps import LastSteps
from gdsstore.transfer.layered_transfers import GroupTransfers, LayerTransfers, Outcomes
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.pipeline import LayerPipeline, LayersComputed, Mask
from gdsstore.transfer.plan import chunks
from gdsstore.transfer.results import PageStatus, SaveResult, Statuses, Unfinished
from gdsstore.transfer.save import Saver, checksums_of
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")

FAILURES = Outcomes(PageStatus.FAILED_DEADLINE, PageStatus.FAILED_IO, PageStatus.FAILED_CANCELLED)


def save_layers(
    saver: Saver,
    job: SaveJob,
    groups: Sequence[LayerGroup],
    ranges: Sequence[Sequence[ByteRange]],
    computed: LayersComputed,
    status: Statuses,
    deadline: Deadline,
    admission: Admission,
) -> tuple[SaveResult, float]:
    """Write the job's pages, each group when it is computed. `ranges`: what each group writes of a record, see
    `block_ranges_of_save`. `status` (one a key of the call) is filled in and returned, with the seconds in which the drives had
    nothing to do. Does not raise.
    """
    runs, refused = _reserve(saver, job, deadline, admission)
    room = sum(run.count for run in runs)
    status[job.at[room:]] = refused
    if room == 0:
        return SaveResult(status), 0.0
    writes: LayerWrites | None = None
    idle_s, failed = 0.0, False
    try:
        slots = Slots.of(np.arange(room), runs)
        writes = LayerWrites(saver.mover, saver.commits, job, slots, saver.chunk_bytes, deadline, admission)
        result = _pipeline(writes, groups, ranges, computed, admission).run(deadline)
        idle_s = result.idle_s
        outcome = writes.outcome
        lost = (outcome == PageStatus.PENDING) & ~result.ok
        outcome[lost] = FAILURES.cancelled if admission.stopping else FAILURES.late
        if lost.all():  # the drives are not to blame, and their segments stay in use
            status[job.at[:room]] = outcome
        else:
            steps = LastSteps.after(deadline)
            entering = saver.commits.enter(job, slots, writes.raw, outcome, status)
            written = saver.commits.entered(job, entering, status, steps.entered)
            saver.commits.commit(job, [(slots, written)], status, steps)
            failed = any_failed(job, slots, status)
    except Exception:  # an exception could not say which memory the drive still reads from; a result does
        log.exception("a layer-wise save failed")
        mine = status[job.at]
        status[job.at[mine == PageStatus.PENDING]] = PageStatus.FAILED_IO
        failed = writes is not None and bool((writes.outcome != PageStatus.PENDING).any())
    finally:
        if writes is not None:
            writes.end()
        saver.commits.let_go(runs, failed=failed)
    return SaveResult(status, [] if writes is None else writes.unfinished), idle_s


def _pipeline(
    writes: LayerWrites,
    groups: Sequence[LayerGroup],
    ranges: Sequence[Sequence[ByteRange]],
    computed: LayersComputed,
    admission: Admission,
) -> LayerPipeline:
    def start(group: LayerGroup, wanted: Mask) -> GroupTransfers:
        return writes.add(ranges[groups.index(group)])

    return LayerPipeline(
        groups,
        len(writes.outcome),
        start,
        lambda first, last, ok: None,
        ahead=len(groups),
        computed=computed,
        stop=lambda: admission.stopping,
    )


def _reserve(
    saver: Saver, job: SaveJob, deadline: Deadline, admission: Admission
) -> tuple[list[SlotRun], PageStatus]:
    """As `Commits.reserve`, chunk by chunk: so the pages are striped over the volumes."""
    runs: list[SlotRun] = []
    refused = PageStatus.PENDING
    for cut in chunks(np.full(len(job.at), job.record_bytes, np.int64), saver.chunk_bytes, taper=False):
        wanted = cut.stop - cut.start
        more, refused = saver.commits.reserve(job.record_bytes, wanted, deadline, admission)
        runs += more
        if sum(run.count for run in more) < wanted:
            break
    return runs, refused


class LayerWrites(LayerTransfers):
    """The pages are those of `slots`, in their order."""

    def __init__(
        self,
        mover: Mover,
        commits: Commits,
        job: SaveJob,
        slots: Slots,
        chunk_bytes: int,
        deadline: Deadline,
        admission: Admission,
    ) -> None:
        memory = job.memory.take(slots.pages)
        super().__init__(mover, Op.WRITE, FAILURES, memory, slots.placed, chunk_bytes, deadline, admission)
        self._commits, self._slots = commits, slots

    def _began(self, pages: Ints, flight: Flight) -> None:
        raw, trusted = checksums_of(self._mover, flight, self._deadline)
        self.raw[pages] += raw
        if not trusted:
            self.outcome[pages] = FAILURES.late if self._deadline.passed else FAILURES.failed

    def _ended(self, pages: Ints, flight: Flight) -> Statuses:
        return self._mover.wait(flight, self._deadline)

    def _drop(self, pages: Ints, flight: Flight) -> list[Unfinished]:
        """The segments stay ours while the drive may still write to them."""
        runs = self._slots.runs_of(pages)
        self._commits.hold(runs)
        return self._mover.drop(flight, partial(self._commits.let_go, runs, failed=False))

"""Saving pages whole: chunk by chunk, several under way at a time, their checksums computed while the drive writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gdsstore.catalog.owned import SlotRun
from gdsstore.catalog.records import Run
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError, GdsStoreError
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.commit import Commits, Entering, SaveJob, Slots, any_failed
from gdsstore.transfer.flight import U64, Flight, Ints
from gdsstore.transfer.last_steps import LastSteps
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.plan import AHEAD_CHUNKS, chunks
from gdsstore.transfer.results import PageStatus, SaveResult, Statuses, Unfinished
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")

EARLY_COMMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk under way."""

    slots: Slots
    flight: Flight
    raw: U64  # raw checksums
    trusted: bool  # they were computed in time: later the caller may have put something else into the memory


@dataclass(slots=True)
class _Written:
    """A chunk that has arrived, or failed. `entering`: None where nobody knows which."""

    slots: Slots
    entering: Entering | None = None


class Saver:
    """Saves for one store. Thread-safe."""

    def __init__(self, mover: Mover, commits: Commits, chunk_bytes: int) -> None:
        self.mover, self.commits, self.chunk_bytes = mover, commits, chunk_bytes

    def save(self, job: SaveJob, status: Statuses, deadline: Deadline, admission: Admission) -> SaveResult:
        """Write the job's pages. `status` (one a key of the call) is filled in and returned. Does not raise."""
        parts: list[_Part] = []
        written: list[_Written] = []
        unfinished: list[Unfinished] = []
        steps = LastSteps.after(deadline)
        committed, enough = 0, EARLY_COMMIT_BYTES // job.record_bytes

        def finish_one() -> None:
            part = parts.pop(self.mover.first_done([part.flight for part in parts], deadline))
            written.append(_Written(part.slots))
            try:
                written[-1].entering = self._finish(job, part, status, deadline)
            except BaseException:  # nobody knows what has moved
                mine = job.at[part.slots.pages]
                status[mine[status[mine] == PageStatus.PENDING]] = PageStatus.FAILED_IO
                raise
            finally:
                unfinished.extend(self._drop(part))

        try:
            for cut in chunks(
                np.full(len(job.at), job.record_bytes, np.int64), self.chunk_bytes, taper=False
            ):
                pages = np.arange(cut.start, cut.stop)
                if admission.stopping:
                    status[job.at[cut.start :]] = PageStatus.FAILED_CANCELLED
                    break
                runs, refused = self.commits.reserve(job.record_bytes, len(pages), deadline, admission)
                room = sum(run.count for run in runs)
                part = None
                if room:
                    part = self._start(
                        job, pages[:room], runs, status, deadline, admission, parts, finish_one, unfinished
                    )
                if part is not None:
                    parts.append(part)
                if (
                    sum(len(each.slots.pages) for each in parts) * job.record_bytes
                    >= AHEAD_CHUNKS * self.chunk_bytes
                ):
                    finish_one()
                if room < len(pages):
                    status[job.at[cut.start + room :]] = refused
                    break
            while parts:
                waiting = written[committed:]
                early = sum(len(each.slots.pages) for each in waiting) >= enough and not self.commits.durable
                if (
                    early
                    and not self.mover.any_done([part.flight for part in parts])
                    and all(each.entering is None or each.entering.done for each in waiting)
                ):
                    # The drive is busy, and less is left to do at the end.
                    self._commit(job, waiting, status, steps)
                    committed = len(written)
                finish_one()
            self._commit(job, written[committed:], status, steps)
        except Exception:  # an exception could not say which memory the drive still reads from; a result does
            log.exception("a save failed")
            mine = status[job.at]
            status[job.at[mine == PageStatus.PENDING]] = PageStatus.FAILED_IO
        finally:
            for part in parts:  # only after an unexpected error
                unfinished.extend(self._drop(part))
            for slots in [*(part.slots for part in parts), *(each.slots for each in written)]:
                self.commits.let_go(slots.runs, failed=any_failed(job, slots, status))
        return SaveResult(status, unfinished)

    def _drop(self, part: _Part) -> list[Unfinished]:
        """Give a chunk's staging back. Its segments stay ours while the drive may still write to them."""
        runs = part.slots.runs
        self.commits.hold(runs)
        return self.mover.drop(part.flight, partial(self.commits.let_go, runs, failed=False))

    def _start(
        self,
        job: SaveJob,
        pages: Ints,
        runs: Sequence[SlotRun],
        status: Statuses,
        deadline: Deadline,
        admission: Admission,
        parts: Sequence[_Part],
        finish_one: Callable[[], None],
        unfinished: list[Unfinished],
    ) -> _Part | None:
        """Submit one chunk; None where it failed as a whole (its status is set then, and its slots are given back)."""
        slots = Slots.of(pages, runs)
        flight = grant = None
        failure = PageStatus.FAILED_DEADLINE
        try:
            while flight is None and not deadline.passed and not admission.stopping:
                left_s = 0.0 if parts else deadline.left_s
                grant = grant or admission.enter(slots.placed.volume, job.record_bytes, left_s)
                if grant is not None:
                    flight = self.mover.start(
                        Op.WRITE,
                        job.memory.take(pages),
                        slots.placed,
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
            self.commits.let_go(runs, failed=False)
            raise
        finally:
            if grant is not None and flight is None:
                grant.done()
        if flight is None:
            status[job.at[pages]] = PageStatus.FAILED_CANCELLED if admission.stopping else failure
            self.commits.let_go(runs, failed=failure is PageStatus.FAILED_IO)
            return None
        return _Part(slots, flight, *checksums_of(self.mover, flight, deadline))

    def _finish(self, job: SaveJob, part: _Part, status: Statuses, deadline: Deadline) -> Entering:
        """Wait for a chunk's payload and begin to write its table entries."""
        outcome = self.mover.wait(part.flight, deadline)
        if not part.trusted:
            late = PageStatus.FAILED_DEADLINE if deadline.passed else PageStatus.FAILED_IO
            outcome[outcome == PageStatus.PENDING] = late
        return self.commits.enter(job, part.slots, part.raw, outcome, status)

    def _commit(self, job: SaveJob, written: Sequence[_Written], status: Statuses, steps: LastSteps) -> None:
        """Make visible what has arrived and got its table entries."""
        runs: list[tuple[Slots, list[Run]]] = []
        for each in written:
            entering, mine = each.entering, []
            if entering is not None:
                mine = self.commits.entered(job, entering, status, steps.entered)
            runs.append((each.slots, mine))
        self.commits.commit(job, runs, status, steps)


def checksums_of(mover: Mover, flight: Flight, deadline: Deadline) -> tuple[U64, bool]:
    """The raw checksums of what a flight writes, (n,), and whether they are to be trusted.

    While the drive writes: nobody may change the memory of a save under way, so it does not matter when we read it.
    """
    pages = len(flight.memory)
    try:
        raw = mover.raw_checksums(flight, np.arange(pages), deadline)
    except GdsStoreError as error:
        log.error("the checksums of a save could not be computed: %s", error)
        return np.zeros(pages, np.uint64), False
    except Exception:  # the drive writes, and who started it must hear of that
        log.exception("the checksums of a save could not be computed")
        return np.zeros(pages, np.uint64), False
    return raw, not deadline.passed

"""Loading pages: look up, read in chunks, verify, and say for each page what became of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.records import Locations
from gdsstore.checksum.definition import finish, seeds
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.memory.views import PageMemory
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import Flight, Placed
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.plan import AHEAD_CHUNKS, chunks
from gdsstore.transfer.results import LoadResult, PageStatus, Statuses, Unfinished
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")


@dataclass(frozen=True, slots=True)
class LoadJob:
    """The pages of one call that the catalog knows; arrays of shape (n,). `at`: their positions in the call."""

    at: npt.NDArray[np.intp]
    keys: npt.NDArray[np.uint8]
    namespace_digest: bytes
    memory: PageMemory
    where: Locations
    placed: Placed
    record_bytes: int


Landed = Callable[[npt.NDArray[np.intp], npt.NDArray[np.uint64]], None]
"""Told the positions in the call of pages that are LOADED, and the raw checksums of their records. Not called without `verify`."""

StillThere = Callable[[npt.NDArray[np.intp]], npt.NDArray[np.bool_]]
"""For positions in the job: whether the catalog still says the same of these pages."""


def load(
    mover: Mover,
    job: LoadJob,
    status: Statuses,
    chunk_bytes: int,
    verify: bool,
    still_there: StillThere,
    deadline: Deadline,
    admission: Admission,
    landed: Landed | None = None,
    meanwhile: Iterator[None] | None = None,
) -> LoadResult:
    """Read the job's pages into their memory. `status` (one a key of the call) is filled in and returned. Does not raise.

    `landed` is told of each chunk, as soon as it is verified. `meanwhile`: other work, done step by step while the drive is busy.
    """
    status[job.at] = PageStatus.MISS_IO  # until better is known
    flights: list[tuple[npt.NDArray[np.intp], Flight]] = []
    unfinished: list[Unfinished] = []

    def finish_one() -> None:
        if meanwhile is not None:
            for _ in meanwhile:
                mover.any_done(
                    [flight for _, flight in flights]
                )  # looking is what moves an engine without threads on
        pages, flight = flights.pop(mover.first_done([flight for _, flight in flights], deadline))
        try:
            part = _finish(mover, job, pages, flight, verify, still_there, deadline)
            status[job.at[pages]] = part
            if landed is not None and flight.sums is not None:
                good = np.flatnonzero(part == PageStatus.LOADED)
                landed(job.at[pages[good]], flight.sums[good])
        finally:
            unfinished.extend(mover.drop(flight))

    try:
        for part in chunks(np.full(len(job.at), job.record_bytes, np.int64), chunk_bytes, taper=True):
            pages = np.arange(part.start, part.stop)
            while True:
                flight = _start(mover, job, pages, status, deadline, admission, wait=not flights)
                if flight is not None or not flights:
                    break
                finish_one()
            if flight is not None:
                flights.append((pages, flight))
            if sum(len(each) for each, _ in flights) * job.record_bytes >= AHEAD_CHUNKS * chunk_bytes:
                finish_one()
        while flights:
            finish_one()
    except Exception:  # an exception could not say which memory the drive still writes to; a result does
        log.exception("a load failed")
    finally:
        for _, flight in flights:  # only after an unexpected error
            unfinished.extend(mover.drop(flight))
    return LoadResult(status, unfinished)


def _start(
    mover: Mover,
    job: LoadJob,
    pages: npt.NDArray[np.intp],
    status: Statuses,
    deadline: Deadline,
    admission: Admission,
    *,
    wait: bool,
) -> Flight | None:
    """None where it is to be tried again after an earlier chunk has ended, and, with `wait`, where it failed."""
    placed, flight = job.placed.take(pages), None
    grant = admission.enter(placed.volume, job.record_bytes, deadline.left_s if wait else 0.0)
    if grant is None or deadline.passed:
        stopped = admission.stopping
        status[job.at[pages]] = PageStatus.MISS_CANCELLED if stopped else PageStatus.MISS_DEADLINE
    else:
        try:
            memory = job.memory.take(pages)
            flight = mover.start(Op.READ, memory, placed, job.record_bytes, deadline, wait=wait, grant=grant)
        except DeadlineError:
            status[job.at[pages]] = PageStatus.MISS_DEADLINE
        except EngineError:
            status[job.at[pages]] = PageStatus.MISS_IO
    if grant is not None and flight is None:
        grant.done()
    return flight


def _finish(
    mover: Mover,
    job: LoadJob,
    pages: npt.NDArray[np.intp],
    flight: Flight,
    verify: bool,
    still_there: StillThere,
    deadline: Deadline,
) -> Statuses:
    status = mover.wait(flight, deadline)
    read = np.flatnonzero(status == PageStatus.PENDING)
    try:
        right = _check(mover, job, pages, flight, read, status, verify, still_there, deadline)
        good = read[right]
        if deadline.passed and len(flight.staged):  # the caller's memory may be somebody else's by now
            late = good[np.isin(good, flight.staged)]
            status[late] = PageStatus.MISS_DEADLINE
            good = np.setdiff1d(good, late)
        mover.scatter(flight, good, deadline)
    except DeadlineError:
        status[status == PageStatus.PENDING] = PageStatus.MISS_DEADLINE
    except EngineError as error:
        log.error("pages that were read could not be put in place: %s", error)
        status[status == PageStatus.PENDING] = PageStatus.MISS_IO
    status[status == PageStatus.PENDING] = PageStatus.LOADED
    return status


def _check(
    mover: Mover,
    job: LoadJob,
    pages: npt.NDArray[np.intp],
    flight: Flight,
    read: npt.NDArray[np.intp],
    status: Statuses,
    verify: bool,
    still_there: StillThere,
    deadline: Deadline,
) -> npt.NDArray[np.bool_]:
    """Which of the pages `read` are what the catalog says; the others get their status. Shape (len(read),)."""
    if not verify:
        right = still_there(pages[read])  # nothing but the generation guards against a reclaimed slot now
        status[read[~right]] = PageStatus.MISS_RECLAIMED
        return right
    mine = pages[read]
    seed = seeds(
        job.keys[mine],
        job.namespace_digest,
        job.where.generation[mine],
        job.where.payload_bytes[mine].astype(np.int64),
    )
    raw = mover.raw_checksums(flight, read, deadline)
    flight.sums = np.zeros(len(flight.memory), np.uint64)
    flight.sums[read] = raw
    right = finish(raw, seed) == job.where.checksum[mine]
    wrong = read[~right]
    if len(wrong):
        # Reclaimed while we read it, or damaged? Only the catalog can tell.
        there = still_there(pages[wrong])
        status[wrong] = np.where(there, PageStatus.MISS_CHECKSUM, PageStatus.MISS_RECLAIMED)
    return np.asarray(right, np.bool_)

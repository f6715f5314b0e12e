"""The reads of a layer-wise load: chunks of layer groups under way one behind the other, each put in place when it has come."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.layout import ALIGNMENT, ByteRange
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import Flight
from gdsstore.transfer.layered_cuts import PageCuts
from gdsstore.transfer.load import LoadJob
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.pipeline import Mask
from gdsstore.transfer.plan import AHEAD_CHUNKS, chunks
from gdsstore.transfer.results import PageStatus, Unfinished
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the records of some pages, for one group."""

    group: GroupRead
    part: ByteRange
    pages: Ints


class LayerReads:
    """For one load, in one thread. `outcome`: of each page of the job, PENDING while nothing is wrong with it. `raw`: the raw
    checksums of what has come of its record.

    Staging never holds more than the chunks that are under way, whatever the size of the load: a chunk leaves it with its bytes
    scattered and summed up, before the rest of its records is read.
    """

    def __init__(
        self,
        mover: Mover,
        job: LoadJob,
        chunk_bytes: int,
        verify: bool,
        deadline: Deadline,
        admission: Admission,
    ) -> None:
        self._mover, self._job, self._chunk_bytes, self._verify = mover, job, chunk_bytes, verify
        self._deadline, self._admission = deadline, admission
        self.outcome = np.full(len(job.at), PageStatus.PENDING, np.uint8)
        self.raw = np.zeros(len(job.at), np.uint64)
        self.unfinished: list[Unfinished] = []
        self._cuts = PageCuts(job.memory)
        self._waiting: deque[_Chunk] = deque()
        self._flights: list[tuple[_Chunk, Ints, Flight]] = []
        self._full = False  # no more fits until something has ended

    def add(self, ranges: Sequence[ByteRange]) -> GroupRead:
        """Read these parts of all records, after what was added before."""
        group = GroupRead(self)
        for part in ranges:
            sizes = np.full(len(self.outcome), part.length, np.int64)
            for cut in chunks(sizes, self._chunk_bytes, taper=True):
                self._waiting.append(_Chunk(group, part, np.arange(cut.start, cut.stop)))
                group.left += 1
        return group

    def advance(self, group: GroupRead) -> None:
        """Begin what can be begun, and finish what has ended until `group` is complete. Waits only where nothing is under way."""
        self._begin_more(wait=False)
        while group.left and (number := self._ended()) is not None:
            self._finish(number)
            self._begin_more(wait=False)
        if group.left and not self._flights:
            self._begin_more(wait=True)

    def end(self) -> None:
        """Begin nothing any more, and let go of what is under way. Idempotent; does not raise."""
        for chunk in self._waiting:
            chunk.group.left -= 1
        self._waiting.clear()
        while self._flights:
            try:
                self._finish(0)
            except Exception:  # the others must be let go of all the same
                log.exception("a part of a layer-wise load could not be finished")

    def _ended(self) -> int | None:
        ended = (n for n, (_, _, flight) in enumerate(self._flights) if self._mover.any_done([flight]))
        return next(ended, None)

    def _begin_more(self, *, wait: bool) -> None:
        while self._waiting and not self._full:
            chunk = self._waiting[0]
            pages = chunk.pages[self.outcome[chunk.pages] == PageStatus.PENDING]
            flight = self._begin(chunk, pages, wait=wait and not self._flights) if len(pages) else None
            if flight is not None:
                self._flights.append((chunk, pages, flight))
                self._full = self._flying_bytes() >= AHEAD_CHUNKS * self._chunk_bytes
            elif (self.outcome[pages] == PageStatus.PENDING).any():  # its turn comes later
                self._full = bool(self._flights)
                return
            else:
                chunk.group.left -= 1
            self._waiting.popleft()

    def _flying_bytes(self) -> int:
        return sum(len(pages) * chunk.part.length for chunk, pages, _ in self._flights)

    def _begin(self, chunk: _Chunk, pages: Ints, *, wait: bool) -> Flight | None:
        """None where it is to be tried again after an earlier chunk has ended, and, with `wait`, where its pages failed."""
        placed = self._job.placed.take(pages)
        nbytes, flight, failure = chunk.part.length, None, PageStatus.MISS_DEADLINE
        grant = self._admission.enter(placed.volume, nbytes, self._deadline.left_s if wait else 0.0)
        try:
            if grant is not None and not self._deadline.passed:
                flight = self._mover.start(
                    Op.READ,
                    self._cuts.take(pages, chunk.part),
                    replace(placed, file_offset=placed.file_offset + chunk.part.offset),
                    nbytes,
                    self._deadline,
                    wait=wait,
                    grant=grant,
                )
        except DeadlineError:
            wait = True
        except EngineError as error:
            log.error("layers could not be read: %s", error)
            wait, failure = True, PageStatus.MISS_IO
        finally:
            if grant is not None and flight is None:
                grant.done()
        if flight is None:
            if wait:
                self.outcome[pages] = PageStatus.MISS_CANCELLED if self._admission.stopping else failure
            return None
        flight.first_block = chunk.part.offset // ALIGNMENT
        return flight

    def _finish(self, number: int) -> None:
        chunk, pages, flight = self._flights.pop(number)
        self._full = False
        chunk.group.left -= 1
        try:
            status = self._mover.wait(flight, self._deadline)
            self._land(pages, flight)
            bad = status != PageStatus.PENDING
            self.outcome[pages[bad]] = status[bad]
        except BaseException:
            self.outcome[pages] = PageStatus.MISS_IO  # nobody knows what has come
            raise
        finally:
            self.unfinished.extend(self._mover.drop(flight))

    def _land(self, pages: Ints, flight: Flight) -> None:
        """Sum up what was read, and put it where it belongs; what that fails for gets its status in the flight."""
        status = flight.status
        read = np.flatnonzero(status == PageStatus.PENDING)
        try:
            if self._verify:
                self.raw[pages[read]] += self._mover.raw_checksums(flight, read, self._deadline)
            if self._deadline.passed:  # the caller's memory may be somebody else's by now
                late = read[np.isin(read, flight.staged)]
                status[late] = PageStatus.MISS_DEADLINE
                read = np.setdiff1d(read, late)
            self._mover.scatter(flight, read, self._deadline)
        except DeadlineError:
            status[read] = PageStatus.MISS_DEADLINE
        except EngineError as error:
            log.error("layers that were read could not be put in place: %s", error)
            status[read] = PageStatus.MISS_IO


class GroupRead:
    """A layer group under way, for `LayerPipeline`. `left`: its chunks that are not finished."""

    def __init__(self, reads: LayerReads) -> None:
        self._reads = reads
        self.left = 0

    @property
    def done(self) -> bool:
        self._reads.advance(self)
        return self.left == 0

    def wait(self, timeout_s: float) -> Mask:
        """Which pages have come so far, once it is done."""
        return np.asarray(self._reads.outcome == PageStatus.PENDING, np.bool_)

    def cancel(self) -> None:
        self._reads.end()

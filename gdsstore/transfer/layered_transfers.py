"""The chunks of a layer-wise call: parts of records, group behind group, several under way at a time.

What a chunk is started with and what becomes of it when it has ended is up to `LayerReads` and `LayerWrites`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.layout import ALIGNMENT, ByteRange
from gdsstore.memory.views import PageMemory
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import Flight, Ints, Placed
from gdsstore.transfer.layered_cuts import PageCuts
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.pipeline import Mask
from gdsstore.transfer.plan import AHEAD_CHUNKS, chunks
from gdsstore.transfer.results import PageStatus, Statuses, Unfinished
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What becomes of pages that fail."""

    late: PageStatus
    failed: PageStatus
    cancelled: PageStatus


@dataclass(frozen=True, slots=True)
class LayerChunk:
    """A part of the records of some pages, for one group."""

    group: GroupTransfers
    part: ByteRange
    pages: Ints


class LayerTransfers(ABC):
    """For one call, in one thread. `outcome`: of each page of the job, PENDING while nothing is wrong with it. `raw`: the raw
    checksums of what has moved of its record.

    Staging never holds more than the chunks that are under way, whatever the size of the call.
    """

    def __init__(
        self,
        mover: Mover,
        op: Op,
        outcomes: Outcomes,
        memory: PageMemory,
        placed: Placed,
        chunk_bytes: int,
        deadline: Deadline,
        admission: Admission,
    ) -> None:
        self._mover, self._op, self._outcomes, self._placed = mover, op, outcomes, placed
        self._chunk_bytes, self._deadline, self._admission = chunk_bytes, deadline, admission
        self.outcome = np.full(len(memory), PageStatus.PENDING, np.uint8)
        self.raw = np.zeros(len(memory), np.uint64)
        self.unfinished: list[Unfinished] = []
        self._cuts = PageCuts(memory)
        self._waiting: deque[LayerChunk] = deque()
        self._flights: list[tuple[LayerChunk, Ints, Flight]] = []
        self._full = False  # no more fits until something has ended

    @abstractmethod
    def _began(self, pages: Ints, flight: Flight) -> None:
        """A chunk is under way."""

    @abstractmethod
    def _ended(self, pages: Ints, flight: Flight) -> Statuses:
        """A chunk has ended, or its deadline has: what became of its pages; PENDING where it is as it should be."""

    @abstractmethod
    def _drop(self, pages: Ints, flight: Flight) -> list[Unfinished]:
        """Let go of a chunk; what is not done."""

    def add(self, ranges: Sequence[ByteRange]) -> GroupTransfers:
        """Move these parts of all records, after what was added before."""
        group = GroupTransfers(self)
        for part in ranges:
            sizes = np.full(len(self.outcome), part.length, np.int64)
            for cut in chunks(sizes, self._chunk_bytes, taper=self._op is Op.READ):
                self._waiting.append(LayerChunk(group, part, np.arange(cut.start, cut.stop)))
                group.left += 1
        return group

    def advance(self, group: GroupTransfers) -> None:
        """Begin what can be begun, and finish what has ended until `group` is complete. Waits only where nothing is under way."""
        self._begin_more(wait=False)
        while group.left and (number := self._first_ended()) is not None:
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
                log.exception("a part of a layer-wise call could not be finished")

    def _first_ended(self) -> int | None:
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
            if flight is not None:
                self._began(pages, flight)

    def _flying_bytes(self) -> int:
        return sum(len(pages) * chunk.part.length for chunk, pages, _ in self._flights)

    def _begin(self, chunk: LayerChunk, pages: Ints, *, wait: bool) -> Flight | None:
        """None where it is to be tried again after an earlier chunk has ended, and, with `wait`, where its pages failed."""
        placed = self._placed.take(pages)
        nbytes, flight, failure = chunk.part.length, None, self._outcomes.late
        grant = self._admission.enter(placed.volume, nbytes, self._deadline.left_s if wait else 0.0)
        try:
            if grant is not None and not self._deadline.passed:
                flight = self._mover.start(
                    self._op,
                    self._cuts.take(pages, chunk.part),
                    replace(placed, file_offset=placed.file_offset + chunk.part.offset),
                    nbytes,
                    self._deadline,
                    wait=wait,
                    grant=grant,
                    unfinished=self.unfinished,
                    first_block=chunk.part.offset // ALIGNMENT,
                )
        except DeadlineError:
            wait = True
        except EngineError as error:
            log.error("layers could not be moved: %s", error)
            wait, failure = True, self._outcomes.failed
        finally:
            if grant is not None and flight is None:
                grant.done()
        if flight is None and wait:
            self.outcome[pages] = self._outcomes.cancelled if self._admission.stopping else failure
        return flight

    def _finish(self, number: int) -> None:
        chunk, pages, flight = self._flights.pop(number)
        self._full = False
        chunk.group.left -= 1
        try:
            status = self._ended(pages, flight)
            bad = status != PageStatus.PENDING
            self.outcome[pages[bad]] = status[bad]
        except BaseException:
            self.outcome[pages] = self._outcomes.failed  # nobody knows what has moved
            raise
        finally:
            self.unfinished.extend(self._drop(pages, flight))


class GroupTransfers:
    """A layer group under way, for `LayerPipeline`. `left`: its chunks that are not finished."""

    def __init__(self, transfers: LayerTransfers) -> None:
        self._transfers = transfers
        self.left = 0

    @property
    def done(self) -> bool:
        self._transfers.advance(self)
        return self.left == 0

    def wait(self, timeout_s: float) -> Mask:
        """Which pages have moved so far, once it is done."""
        return np.asarray(self._transfers.outcome == PageStatus.PENDING, np.bool_)

    def cancel(self) -> None:
        self._transfers.end()

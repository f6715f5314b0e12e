"""The reads of a layer-wise load: each chunk is summed up and put in place when it has come."""

from __future__ import annotations

import logging

import numpy as np

from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import Flight, Ints
from gdsstore.transfer.layered_transfers import LayerTransfers, Outcomes
from gdsstore.transfer.load import LoadJob
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.results import PageStatus, Statuses, Unfinished
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")

MISSES = Outcomes(PageStatus.MISS_DEADLINE, PageStatus.MISS_IO, PageStatus.MISS_CANCELLED)


class LayerReads(LayerTransfers):
    """A chunk leaves staging with its bytes scattered and summed up, before the rest of its records is read."""

    def __init__(
        self,
        mover: Mover,
        job: LoadJob,
        chunk_bytes: int,
        verify: bool,
        deadline: Deadline,
        admission: Admission,
    ) -> None:
        super().__init__(mover, Op.READ, MISSES, job.memory, job.placed, chunk_bytes, deadline, admission)
        self._verify = verify

    def _began(self, pages: Ints, flight: Flight) -> None:
        """Nothing can be done before the bytes are there."""

    def _ended(self, pages: Ints, flight: Flight) -> Statuses:
        status = self._mover.wait(flight, self._deadline)
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
        return status

    def _drop(self, pages: Ints, flight: Flight) -> list[Unfinished]:
        return self._mover.drop(flight)

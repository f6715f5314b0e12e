"""A call's chunks on their way to the drives: let in by the scheduler, and kept from volumes that are sick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op
from gdsstore.transfer.flight import ChunkGrant
from gdsstore.transfer.policy_terms import Cost, TransferClass
from gdsstore.transfer.scheduler import Scheduler
from gdsstore.transfer.scheduler_jobs import Job
from gdsstore.volume.health import Breaker, VolumeHealth

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Admission(Protocol):
    """What lets the chunks of one call in, in its worker."""

    @property
    def stopping(self) -> bool:
        """Whether the call was cancelled: nothing new is to be begun."""

    @property
    def some_writable(self) -> bool:
        """Whether there is a volume that answers."""

    def readable(self, volume: I64) -> Mask:
        """Which of the pages, on these volumes, are to be read. Shape (n,)."""

    def enter(self, volume: I64, record_bytes: int, timeout_s: float) -> ChunkGrant | None:
        """Wait until a chunk of pages on these volumes may go to the engine. None where that was not so in time, or the call is
        to stop. Who holds grants asks with a timeout of 0: see `Scheduler.admit`."""


class ScheduledAdmission:
    """By the scheduler, for one of its jobs."""

    def __init__(
        self, scheduler: Scheduler, job: Job[Any], health: Mapping[Op, Sequence[VolumeHealth]]
    ) -> None:
        self._scheduler, self._job, self._health = scheduler, job, health

    @property
    def stopping(self) -> bool:
        return self._job.stopping

    @property
    def some_writable(self) -> bool:
        return any(each.breaker is Breaker.CLOSED for each in self._health[Op.WRITE])

    def readable(self, volume: I64) -> Mask:
        health = self._health[Op.READ]
        fit = np.zeros(len(health), np.bool_)
        for index in np.unique(volume).tolist():
            fit[index] = health[index].breaker is Breaker.CLOSED
        return fit[volume]

    def enter(self, volume: I64, record_bytes: int, timeout_s: float) -> ChunkGrant | None:
        index, count = np.unique(volume, return_counts=True)
        units = {
            number: Cost(pages * record_bytes, pages)
            for number, pages in zip(index.tolist(), count.tolist(), strict=True)
        }
        return self._scheduler.admit(self._job, units, timeout_s)


class FreeAdmission:
    """For work inside a call that has its turn already, and would wait for itself."""

    stopping = False
    some_writable = True

    def readable(self, volume: I64) -> Mask:
        return np.ones(len(volume), np.bool_)

    def enter(self, volume: I64, record_bytes: int, timeout_s: float) -> ChunkGrant | None:
        return _FREE


class _FreeGrant:
    cls = TransferClass.OFFLOAD  # the host cache writes what its room is needed of, whoever needs it

    def moved(self) -> None: ...

    def done(self) -> None: ...

    def late(self) -> None: ...


_FREE = _FreeGrant()

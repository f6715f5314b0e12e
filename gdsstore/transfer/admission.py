"""A call's chunks on their way to the drives: let in by the scheduler, and kept from volumes that are sick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.transfer.policy_terms import Cost
from gdsstore.transfer.scheduler import Scheduler
from gdsstore.transfer.scheduler_jobs import Grant, Job
from gdsstore.volume.health import Breaker, VolumeHealth


class Admission:
    """For one call, in its worker."""

    def __init__(self, scheduler: Scheduler, job: Job[Any], health: Sequence[VolumeHealth]) -> None:
        self._scheduler, self._job, self._health = scheduler, job, health

    @property
    def stopping(self) -> bool:
        """Whether the call was cancelled: nothing new is to be begun."""
        return self._job.stopping

    @property
    def some_writable(self) -> bool:
        """Whether there is a volume that answers."""
        return any(each.breaker is Breaker.CLOSED for each in self._health)

    def readable(self, volume: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of the pages, on these volumes, are to be read. Shape (n,)."""
        fit = np.zeros(len(self._health), np.bool_)
        for index in np.unique(volume).tolist():
            fit[index] = self._health[index].allows(write=False)
        return fit[volume]

    def enter(self, volume: npt.NDArray[np.int64], record_bytes: int, timeout_s: float) -> Grant | None:
        """Wait until a chunk of pages on these volumes may go to the engine. None where that was not so in time, or the call is
        to stop. Who holds grants asks with a timeout of 0: see `Scheduler.admit`."""
        index, count = np.unique(volume, return_counts=True)
        units = {
            number: Cost(pages * record_bytes, pages)
            for number, pages in zip(index.tolist(), count.tolist(), strict=True)
        }
        return self._scheduler.admit(self._job, units, timeout_s)

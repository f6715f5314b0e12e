"""Two directories as drives of their own, which can be made sick through the faulty engine."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gdsstore
from gdsstore.drill.plan import DrillFault
from gdsstore.engines.base import Engine, Op, RangePlan
from gdsstore.engines.by_drive import ByDriveEngine
from gdsstore.engines.choose import make_engine
from gdsstore.engines.faults import Fault, FaultKind
from gdsstore.engines.faulty import FaultyEngine

WELL, SICK = 0, 1
CRAWL_S = 0.5
FAULTS: dict[DrillFault, Sequence[Fault]] = {
    DrillFault.HANG: (Fault(FaultKind.HANG),),
    DrillFault.ERRORS: (Fault(FaultKind.ERRNO),),
    DrillFault.CRAWL: (Fault(FaultKind.DELAY, delay_s=CRAWL_S),),
    DrillFault.CORRUPT: (
        Fault(FaultKind.CORRUPT, probability=0.2),
        Fault(FaultKind.MISDIRECT, probability=0.05),
    ),
    DrillFault.FULL: (Fault(FaultKind.ERRNO, op=Op.WRITE, errno_code=errno.ENOSPC),),
}


class Drives:
    """Two new directories and the engine that moves their bytes; `fault` is what ails them while `sick` is true."""

    def __init__(self, path: Path, config: gdsstore.Config, fault: DrillFault) -> None:
        """Raises EngineError and MissingExtraError, as the engine of the settings does."""
        self.paths = [path / "well", path / "sick"]
        self.sick = False
        self._config, self._fault = config, fault
        self._engines: list[FaultyEngine] = []
        self.engine = ByDriveEngine(self._make, self._drive_of)

    @property
    def injected(self) -> int:
        """Requests that the fault has hit so far."""
        return sum(sum(engine.injected.values()) for engine in self._engines)

    def heal(self) -> None:
        """The fault is over, and what hung goes on."""
        self.sick = False
        for engine in self._engines:
            engine.release_hangs()

    def _make(self) -> Engine:
        config = self._config
        inner = make_engine(
            config.engine, posix_threads=config.posix_threads, in_flight_ranges=config.in_flight_ranges
        )
        number = len(self._engines)
        faults = [
            Fault(
                each.kind,
                op=each.op,
                probability=each.probability,
                match=self._hit,
                errno_code=each.errno_code,
                delay_s=each.delay_s,
            )
            for each in FAULTS[self._fault]
        ]
        self._engines.append(FaultyEngine(inner, faults, seed=number))
        return self._engines[-1]

    def _drive_of(self, fd: int) -> int:
        return SICK if os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.paths[SICK])) else WELL

    def _hit(self, plan: RangePlan) -> npt.NDArray[np.bool_]:
        """Which ranges of a plan, which is of one drive, can be hit now."""
        ill = self.sick and len(plan) > 0
        if ill and self._fault is not DrillFault.FULL:
            ill = self._drive_of(int(plan.fd[0])) == SICK
        return np.full(len(plan), ill)

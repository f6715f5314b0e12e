"""Two directories as drives of their own, of which one can be made sick."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Engine, RangePlan
from gdsstore.engines.by_drive import ByDriveEngine
from gdsstore.engines.choose import make_engine
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.throttle import ThrottledEngine

WELL, SICK = 0, 1
FAULTS = {
    "hangs": Fault(FaultKind.HANG),
    "errs": Fault(FaultKind.ERRNO),
    "crawls": Fault(FaultKind.DELAY, delay_s=0.5),
}


class Drives:
    """Two directories as drives of their own, each no faster than `bytes_per_s`; `sickness` is what ails the second one."""

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        self.paths = [path / "well", path / "sick"]
        self.sickness: str | None = None
        self._bytes_per_s = bytes_per_s
        self._engines: list[FaultyEngine] = []
        self.engine = ByDriveEngine(self._make, lambda fd: self._is_sick(fd))

    def _make(self) -> Engine:
        inner = make_engine("auto", posix_threads=8, in_flight_ranges=128)
        faults = [
            Fault(each.kind, match=self._hit(name), delay_s=each.delay_s) for name, each in FAULTS.items()
        ]
        engine = FaultyEngine(ThrottledEngine(inner, self._bytes_per_s), faults, seed=0)
        self._engines.append(engine)
        return engine

    def _is_sick(self, fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.paths[SICK]))

    def _hit(self, name: str) -> Callable[[RangePlan], npt.NDArray[np.bool_]]:
        return lambda plan: np.full(
            len(plan), self.sickness == name and len(plan) > 0 and self._is_sick(int(plan.fd[0]))
        )

    def heal(self) -> None:
        self.sickness = None
        for engine in self._engines:
            engine.release_hangs()

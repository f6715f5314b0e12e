"""What a restore costs beside the drive's time: the CPU's copies into the pool's pieces, and waiting for a core."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdsstore.memory.copying import copy_ranges
from linker_parts.device import Device

TASKS = Path("/proc/self/task")


class Cpu(NamedTuple):
    """Of all threads of this process, in seconds. `queued`: ready to run, and no core was free."""

    used: float
    queued: float

    @classmethod
    def now(cls) -> Cpu:
        waited = 0
        for task in TASKS.glob("*/schedstat"):
            try:
                waited += int(task.read_text().split()[1])
            except (OSError, IndexError):  # a thread that ended, or a kernel without the file
                continue
        return cls(time.process_time(), waited / 1e9)

    def since(self, start: Cpu) -> Cpu:
        """A thread that ended in between leaves its waiting out."""
        return Cpu(self.used - start.used, max(0.0, self.queued - start.queued))


def copy_alone(device: Device, source: int, place: npt.NDArray[np.intp]) -> float:
    """Seconds in which one thread copies a restore's pieces, from the address `source` on, to where the restore puts them."""
    pieces = device.pieces(place)
    length = np.full(len(pieces), device.piece_bytes, np.int64)
    at = np.uint64(source) + np.arange(len(pieces), dtype=np.uint64) * np.uint64(device.piece_bytes)
    start = time.perf_counter()
    copy_ranges(at, pieces, length)
    return time.perf_counter() - start

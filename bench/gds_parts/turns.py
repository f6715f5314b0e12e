"""What a contender does in its turn, and what that yields. The rounds know contenders by this alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from gds_parts.sizes import Cell
from gdsstore.errors import GdsStoreError

Memory = Literal["device", "host", "reference"]
LatencyOf = Literal["plan", "record"]
F64 = npt.NDArray[np.float64]

DIRECT = "direct"
HOST = "host"  # the path of what ends in host memory
NOT_COUNTED = "not counted"  # of programs that do not tell


@dataclass(frozen=True, slots=True)
class Turn:
    """`percentiles_us`: p50 and p99 of a program that tells only those. `paths`: bytes by path, latency plans included."""

    gbps: float
    cpu_s_per_gb: float | None
    paths: dict[str, int]
    latencies_us: F64 = field(default_factory=lambda: np.zeros(0))
    percentiles_us: tuple[float, float] | None = None
    dram_bytes_per_byte: float | None = None


class Contender(Protocol):
    """Open for one number of submitters. Not thread-safe."""

    name: str
    memory: Memory
    latency_of: LatencyOf
    turns: int | None  # it takes at most so many in a cell

    def prove(self, cell: Cell) -> None:
        """Warm up, and make sure that the right bytes move. Raises WrongBytesError where they do not."""

    def turn(self, cell: Cell) -> Turn: ...

    def close(self) -> None: ...


class WrongBytesError(GdsStoreError):
    """What was read or written is not what it should be."""

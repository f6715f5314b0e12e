"""How bytes reached the drive, counted."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum

from gdsstore.engines.base import Op


class Path(StrEnum):
    DIRECT = "direct"  # the drive and the GPU, with nothing between
    COMPAT = "compat"  # through host memory, inside cuFile or kvikio
    BOUNCE = "bounce"  # through host memory, by ours


class PathCounters:
    """Bytes moved so far, by direction and path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[Op, Path]] = Counter()

    def add(self, op: Op, path: Path, nbytes: int) -> None:
        if nbytes:
            with self._lock:
                self._bytes[op, path] += nbytes

    def bytes_by(self) -> dict[tuple[Op, Path], int]:
        """A copy; what never moved is not in it."""
        with self._lock:
            return dict(self._bytes)

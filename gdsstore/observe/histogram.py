"""How long things took, counted in fixed buckets: a few hundred nanoseconds an observation."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BOUNDS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper ends of the buckets, in seconds: from a load out of the page cache to a drive that hangs."""


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """`counts[i]`: observations of at most `bounds_s[i]` seconds that no earlier bucket took; the last one has no bound. `sum_s`:
    of all observations."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


class Histogram:
    """Thread-safe."""

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        """`bounds_s`: rising."""
        self._bounds_s = tuple(bounds_s)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self._bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        bucket = bisect_left(self._bounds_s, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._sum_s += seconds

    def stats(self) -> HistogramStats:
        with self._lock:
            return HistogramStats(self._bounds_s, tuple(self._counts), self._sum_s)

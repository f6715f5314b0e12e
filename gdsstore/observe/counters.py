"""Counters of one store in one process: plain numbers, cheap to add to, read as one dictionary."""

from __future__ import annotations

import threading
import time
from collections import Counter

from gdsstore.engines.base import Op
from gdsstore.observe.histogram import Histogram, HistogramStats


class Counters:
    """Thread-safe. Names are stable: `stats()` and the metrics are made from them."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()
        self._chunks: dict[tuple[Op, int], Histogram] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def moved(self, op: Op, engine: str, nbytes: int, requests: int) -> None:
        """Bytes that an engine moved, by direction; `drive_bytes_read` and `drive_bytes_written` are their sums."""
        direction = "read" if op is Op.READ else "written"
        with self._lock:
            self._values[f"drive_bytes_{direction}"] += nbytes
            self._values[f"drive_requests_{direction}"] += requests
            self._values[f"drive_bytes_{direction}_{engine}"] += nbytes

    def chunk(self, op: Op, volume: int, seconds: float) -> None:
        """A chunk's I/O on a volume, by its index, has ended or was given up."""
        with self._lock:
            histogram = self._chunks.setdefault((op, volume), Histogram())
        histogram.observe(seconds)

    def chunk_times(self, op: Op, volume: int) -> HistogramStats:
        with self._lock:
            histogram = self._chunks.get((op, volume)) or Histogram()
        return histogram.stats()

    def outcome(self, reasons: dict[str, int]) -> None:
        """Pages by outcome; see transfer.results.PageStatus."""
        with self._lock:
            for name, count in reasons.items():
                self._values[f"pages_{name.lower()}"] += count

    def looked_up(self, hits: int, misses: int) -> None:
        with self._lock:
            self._values["lookup_hits"] += hits
            self._values["lookup_misses"] += misses

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)

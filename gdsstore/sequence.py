"""The order of what is written into record tables: which of two entries for a page is the newer, and what a clear covers."""

from __future__ import annotations

import threading
import time


class Sequencer:
    """Rising numbers that go with the clock (nanoseconds), but never back with it. Thread-safe."""

    def __init__(self, behind: int) -> None:
        """`behind`: all numbers are larger than this one."""
        self._lock = threading.Lock()
        self._last = behind

    def take(self, count: int = 1) -> int:
        """The first of `count` consecutive numbers, which nobody else in this process gets."""
        with self._lock:
            first = max(time.time_ns(), self._last + 1)
            self._last = first + count - 1
            return first

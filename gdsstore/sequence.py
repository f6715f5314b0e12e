"""The order of what is written into record tables: which of two entries for a page is the newer, and what a clear covers."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

LAST_SEQUENCE = 1 << 62
"""Nanoseconds. Numbers beyond it are nobody's: they would leave none for what is saved later."""


class Sequencer:
    """Rising numbers that go with the clock (nanoseconds), but never back with it. Thread-safe."""

    def __init__(self, behind: int, shared: npt.NDArray[np.uint64] | None = None) -> None:
        """`behind`: all numbers are larger than this one. `shared`, of shape (1,): the largest number that any process of the
        store took, in memory that they all map. Without it, a process that was opened after the clock went back would count what it
        saves as older than what others dropped before."""
        self._lock = threading.Lock()
        self._last = behind
        self._shared = np.zeros(1, np.uint64) if shared is None else shared

    def take(self, count: int = 1) -> int:
        """The first of `count` consecutive numbers, which nobody else in this process gets. They are larger than those that any
        process had got when this was called."""
        with self._lock:
            theirs = int(self._shared[0])
            first = max(time.time_ns(), self._last + 1, theirs + 1 if theirs < LAST_SEQUENCE else 0)
            self._last = first + count - 1
            # Not atomic with the look above: of what happens at the same time, either may be the first.
            self._shared[0] = self._last
            return first

"""When an engine that has to ask whether its transfers have ended asks again."""

from __future__ import annotations

import time

PAUSE_MIN_S, PAUSE_MAX_S = 50e-6, 1e-3


class Pace:
    """Guesses when to look again from the bytes under way and how fast bytes went lately: each look costs CPU time, and a late
    one leaves the drive idle."""

    def __init__(self) -> None:
        self._under_way = 0  # bytes
        self._rate = 1e9  # bytes a second
        self._since = time.monotonic()  # when bytes came last, or were started after there were none

    def started(self, nbytes: int) -> None:
        if self._under_way == 0:
            self._since = time.monotonic()
        self._under_way += nbytes

    def looked(self, left: int) -> None:
        """Some parts have ended; `left` bytes are still under way."""
        now = time.monotonic()
        self._rate += 0.25 * ((self._under_way - left) / max(now - self._since, 1e-6) - self._rate)
        self._since, self._under_way = now, left

    def pause_s(self, nbytes: int) -> float:
        """Half of the time until `nbytes` should have moved, or of the time since when it is overdue."""
        early = nbytes / self._rate - (time.monotonic() - self._since)
        return min(max(abs(early) / 2, PAUSE_MIN_S), PAUSE_MAX_S)

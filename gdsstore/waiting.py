"""Deadlines. Every wait in this library has one."""

from __future__ import annotations

import time


class Deadline:
    """A point on the monotonic clock, `seconds` from now."""

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


def pause(seconds: float) -> None:
    time.sleep(seconds)

"""How well each volume answers: a breaker for those that fail, and a mark on those that are slow.

Pure but for a lock: the clock is given, nothing is read or written here. Whoever moves bytes asks `allows` before, and says
with `record` how it went.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from gdsstore.volume.health_window import OutcomeWindow, Pace


class Breaker(StrEnum):
    CLOSED = "closed"  # used
    OPEN = "open"  # not used
    HALF_OPEN = "half_open"  # one transfer at a time is let through, to see


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When a volume is sick or slow. Times in seconds."""

    window_s: float = 10.0  # over which errors are counted, and the pace of now is taken
    least: int = 8  # transfers in the window, below which it says nothing
    error_share: float = 0.5  # of the transfers in the window: opens the breaker
    timeouts_in_a_row: int = 3  # opens it too: a drive that hangs gives few answers to count
    first_retry_s: float = 1.0
    longest_retry_s: float = 60.0
    probes: int = 3  # that must go well, one after the other, to close it
    probe_s: float = 30.0  # after which a probe that nobody spoke of any more is given up
    slow_than_usual: float = 4.0  # times the seconds a byte of its own past
    slow_than_others: float = 3.0  # and times those of the other volumes
    slow_after_s: float = 10.0  # for so long
    slow_for_s: float = 30.0  # then saves avoid it, until this long after the last sign of it


NEVER_SICK = HealthLimits(error_share=2.0, timeouts_in_a_row=sys.maxsize, slow_after_s=math.inf)


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """For metrics. Counts are since the start; `error_share` is of the window; `retry_in_s` is 0 unless OPEN."""

    breaker: Breaker
    slow: bool
    transfers: int
    errors: int
    timeouts: int
    error_share: float
    opened: int
    retry_in_s: float
    seconds_a_mib: float | None  # of now; None where too little moved
    usual_seconds_a_mib: float | None


class VolumeHealth:
    """The health of one volume. Thread-safe. Made by `watch_volumes`.

    The breaker opens on many errors or on timeouts in a row. It half-opens by itself after a while, which doubles each time that
    a probe fails, and closes after a few probes that went well. Whoever is told that it `allows` a transfer makes the next probe;
    calls ask only whether it is CLOSED, so that none of them has to find out, and `SickVolumes` makes the probes.

    A volume is slow when it takes much longer for a byte than it used to, and much longer than the others do now, for some
    time. Reads and writes count alike, since volumes get their share of both. Alone it never is: there is nowhere else to save to.
    """

    def __init__(
        self, limits: HealthLimits, clock: Callable[[], float], on_open: Callable[[], None] = lambda: None
    ) -> None:
        """`on_open` is called when the breaker opens, with a lock held: it must not wait."""
        self._limits, self._clock, self._on_open = limits, clock, on_open
        self._lock = threading.Lock()
        self._others: list[VolumeHealth] = []
        self._breaker = Breaker.CLOSED
        self._window = OutcomeWindow(limits.window_s)
        self._pace = Pace(limits.window_s, limits.least)
        self._in_a_row = 0  # timeouts
        self._retry_s = limits.first_retry_s
        self._retry_at = 0.0
        self._closed_at = 0.0
        self._probe_at: float | None = None  # when the probe under way began
        self._probes_left = 0
        self._looks_slow_since: float | None = None
        self._looked_slow_at = 0.0
        self._slow_until = -1.0
        self._transfers = self._errors = self._timeouts = self._opened = 0

    @property
    def breaker(self) -> Breaker:
        return self._breaker

    @property
    def slow(self) -> bool:
        return self._slow_until >= 0 and self._clock() < self._slow_until

    @property
    def healthy(self) -> bool:
        """Whether it is used like any other: CLOSED and not slow. Unlike `allows`, makes nobody a probe."""
        return self._breaker is Breaker.CLOSED and not self.slow

    def allows(self, *, write: bool) -> bool:
        """Whether to use the volume now. Writes also avoid a slow one. While it is HALF_OPEN, True makes the caller's next transfer
        the probe: it must `record` how that went."""
        if self._breaker is Breaker.CLOSED:
            return not (write and self.slow)
        with self._lock:
            return self._may_probe(self._clock())

    def record(self, *, ok: bool, nbytes: int, seconds: float, timed_out: bool = False) -> None:
        """A transfer of `nbytes` has ended, or was given up, after `seconds`. `ok`: all its bytes moved.

        What is no fault of the drive (a full filesystem, a file that was deleted) is not recorded.
        """
        now = self._clock()
        with self._lock:
            self._transfers += 1
            self._errors += not ok
            self._timeouts += timed_out
            self._in_a_row = self._in_a_row + 1 if timed_out else 0
            if self._breaker is Breaker.CLOSED:
                self._window.add(now, ok)
                if ok:
                    if self._pace.add(now, nbytes, seconds):
                        self._judge_pace(now)
                elif self._is_sick(now):
                    self._open(now)
            elif self._breaker is Breaker.HALF_OPEN and self._is_the_probe(now - seconds):
                self._probe_at = None
                self._probes_left -= 1
                if not ok:
                    self._open(now)
                elif self._probes_left == 0:
                    self._close(now)

    def snapshot(self) -> HealthSnapshot:
        now = self._clock()
        with self._lock:
            return HealthSnapshot(
                self._breaker,
                now < self._slow_until,
                self._transfers,
                self._errors,
                self._timeouts,
                self._window.error_share(now),
                self._opened,
                max(0.0, self._retry_at - now) if self._breaker is Breaker.OPEN else 0.0,
                self._pace.now(now),
                self._pace.usual,
            )

    def watch_others(self, others: list[VolumeHealth]) -> None:
        """The volumes that its pace is compared with."""
        self._others = others

    # --- with the lock held ---

    def _may_probe(self, now: float) -> bool:
        if self._breaker is Breaker.CLOSED:  # since a moment ago
            return True
        if self._breaker is Breaker.OPEN:
            if now < self._retry_at:
                return False
            self._breaker = Breaker.HALF_OPEN
            self._probes_left, self._probe_at = self._limits.probes, None
        if self._probe_at is not None and now - self._probe_at < self._limits.probe_s:
            return False
        self._probe_at = now
        return True

    def _is_sick(self, now: float) -> bool:
        if self._in_a_row >= self._limits.timeouts_in_a_row:
            return True
        return (
            self._window.count(now) >= self._limits.least
            and self._window.error_share(now) >= self._limits.error_share
        )

    def _is_the_probe(self, began: float) -> bool:
        # What began before the probe was under way when the breaker opened, and says nothing of now.
        return self._probe_at is not None and began >= self._probe_at - 1e-3

    def _open(self, now: float) -> None:
        limits = self._limits
        again = self._breaker is Breaker.HALF_OPEN or (
            self._opened > 0 and now - self._closed_at < limits.longest_retry_s
        )
        self._retry_s = min(self._retry_s * 2, limits.longest_retry_s) if again else limits.first_retry_s
        self._breaker, self._retry_at, self._probe_at = Breaker.OPEN, now + self._retry_s, None
        self._opened += 1
        self._window.clear()
        self._in_a_row = 0
        self._on_open()

    def _close(self, now: float) -> None:
        self._breaker, self._closed_at = Breaker.CLOSED, now

    def _judge_pace(self, now: float) -> None:
        mine, usual = self._pace.now(now), self._pace.usual
        # Without the others' locks: two that record at the same time must not wait for each other.
        paces = [pace for other in self._others if (pace := other._pace.now(now)) is not None]
        if mine is None or usual is None or not paces:
            return
        limits = self._limits
        if mine < usual * limits.slow_than_usual or mine < statistics.median(paces) * limits.slow_than_others:
            self._looks_slow_since = None
            self._slow_until = -1.0
            self._pace.learn()
            return
        if self._looks_slow_since is None or now - self._looked_slow_at > limits.slow_after_s:
            self._looks_slow_since = now
        self._looked_slow_at = now
        if now - self._looks_slow_since >= limits.slow_after_s:
            self._slow_until = now + limits.slow_for_s


def watch_volumes(
    count: int,
    limits: HealthLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_open: Callable[[], None] = lambda: None,
) -> list[VolumeHealth]:
    """The health of `count` volumes, each compared with the others. `on_open`: see VolumeHealth."""
    volumes = [VolumeHealth(limits or HealthLimits(), clock, on_open) for _ in range(count)]
    for volume in volumes:
        volume.watch_others([other for other in volumes if other is not volume])
    return volumes

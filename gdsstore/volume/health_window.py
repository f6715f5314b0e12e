"""Sliding sums over the last seconds, for the health of a volume."""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20
STEPS: Final = 10
LEARN: Final = 0.02
"""The weight that the pace of now has in the usual one, each time that it is learnt from."""


class OutcomeWindow:
    """How many transfers went well and how many did not, over `window_s` seconds, in steps of a tenth of that."""

    def __init__(self, window_s: float) -> None:
        self._step_s = window_s / STEPS
        self._steps: list[tuple[int, int, int]] = []  # number of the step, transfers, errors

    def add(self, now: float, ok: bool) -> None:
        step = int(now // self._step_s)
        if self._steps and self._steps[-1][0] >= step:
            last = self._steps[-1]
            self._steps[-1] = (last[0], last[1] + 1, last[2] + (not ok))
            return
        self._steps = [each for each in self._steps if each[0] > step - STEPS]
        self._steps.append((step, 1, int(not ok)))

    def count(self, now: float) -> int:
        return self._sums(now)[0]

    def error_share(self, now: float) -> float:
        """Errors among the transfers; 0 where there were none."""
        transfers, errors = self._sums(now)
        return errors / transfers if transfers else 0.0

    def clear(self) -> None:
        self._steps = []

    def _sums(self, now: float) -> tuple[int, int]:
        oldest = int(now // self._step_s) - STEPS
        recent = [each for each in self._steps if each[0] > oldest]
        return sum(each[1] for each in recent), sum(each[2] for each in recent)


class Pace:
    """Seconds a MiB, now and usually. A transfer counts as one MiB more than it is: small ones take long for what they move."""

    def __init__(self, window_s: float, least: int) -> None:
        self._step_s, self._least = window_s / STEPS, least
        self._steps: list[tuple[int, int, float, float]] = []  # number of the step, transfers, MiB, seconds
        self._recent: float | None = None
        self.usual: float | None = None  # its own past, without the times at which it looked slow

    def add(self, now: float, nbytes: int, seconds: float) -> bool:
        """True once a step: then there is something new to judge by."""
        step, mib = int(now // self._step_s), 1 + nbytes / MIB
        if self._steps and self._steps[-1][0] >= step:
            last = self._steps[-1]
            self._steps[-1] = (last[0], last[1] + 1, last[2] + mib, last[3] + seconds)
            return False
        self._recent = self.now(now)
        if self.usual is None:
            self.usual = self._recent
        # A new list each time: others read it without a lock.
        self._steps = [*(each for each in self._steps if each[0] > step - STEPS), (step, 1, mib, seconds)]
        return True

    def now(self, now: float) -> float | None:
        """Over the window; None where too few transfers ended in it."""
        oldest = int(now // self._step_s) - STEPS
        recent = [each for each in self._steps if each[0] > oldest]
        if sum(each[1] for each in recent) < self._least:
            return None
        return sum(each[3] for each in recent) / sum(each[2] for each in recent)

    def learn(self) -> None:
        """Let the pace at the last `add` that was True count towards the usual one."""
        if self._recent is not None and self.usual is not None:
            self.usual += LEARN * (self._recent - self.usual)

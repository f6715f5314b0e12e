"""How many chunks of one direction shall be under way on one volume: found by trial, from the rates that the drive gives.

Pure numbers: no clock, no bytes. `caps.py` measures the rates.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

LEAST_CHUNKS: Final = 2  # one is with the drive while the host looks after another
MOST: Final = 4  # times what it begins with: chunks may lie in staging memory
STEP: Final = 1.25
# Which interval of a trial has the other count, so that a drive that becomes faster or slower all the while favours neither.
ORDER: Final = (False, True, True, False) * 2
ROUNDS: Final = 4  # of ORDER, until something can be told from chance
SURE: Final = 2.0  # standard errors
LOSS: Final = math.log(1 - 0.03)  # that fewer chunks may cost, in one step
LOSS_IN_ALL: Final = math.log(1 - 0.05)
GAIN: Final = math.log(1 + 0.05)  # that more chunks must bring. More than LOSS, or it would go to and fro
REST: Final = 8, 128  # intervals between two trials: after the first that found nothing, and at most


class CapSearch:
    """By Little's law a drive needs its bandwidth times its latency without a queue under way; more only waits. That latency is
    seldom to be seen in a store that is busy. So this looks for the same amount from the other side: the fewest chunks with which
    the rate is what it is with more.

    A trial sets a count and the next one to it against each other, in turns, several times. The other count is taken where that
    changes the rate in its favour by more than chance does: fewer chunks if they cost next to nothing, more if they bring
    something. A drive whose rate goes up and down by itself leaves it where it is. Trials that find nothing become rare.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._least, self._most = min(LEAST_CHUNKS, chunks), MOST * chunks
        self._rates: list[float] = []  # of the round of a trial that is under way, in the order of ORDER
        self._changes: list[float] = []  # of the logarithm of the rate, by the other count; of all rounds
        self._up = False
        self._aim()
        self._lost = 0.0  # by all the steps down since the last one up
        self._rest, self._resting = REST[0], 0

    @property
    def in_use(self) -> int:
        """Chunks for the interval that comes."""
        if self._resting:
            return self.chunks
        return self._other if ORDER[len(self._rates)] else self.chunks

    def measured(self, rate: float) -> None:
        """An interval with `in_use` chunks is over, in which they were the limit. `rate`: bytes a second, above 0."""
        if self._resting:
            self._resting -= 1
            return
        self._rates.append(rate)
        if len(self._rates) == len(ORDER):
            pairs = zip(self._rates[::2], self._rates[1::2], ORDER[1::2], strict=True)
            self._changes += [
                math.log(second / first if other else first / second) for first, second, other in pairs
            ]
            self._rates.clear()
            self._judge()

    def _judge(self) -> None:
        """End the trial, where it is clear what came of it."""
        change, number = statistics.fmean(self._changes), len(self._changes)
        # A few that happen to be alike say less than they seem to.
        chance = SURE * (1 + 2 / number) * statistics.stdev(self._changes) / math.sqrt(number)
        if self._up:
            good, bad = change - chance >= GAIN, change + chance < GAIN
        else:
            good = change - chance >= LOSS and self._lost + change >= LOSS_IN_ALL
            # A loss ends it early: it costs while it is tried.
            bad = change + chance < LOSS or change < 2 * LOSS or self._lost + change < LOSS_IN_ALL
        if good:
            self._lost = 0.0 if self._up else min(0.0, self._lost + change)
            self.chunks, self._rest = self._other, REST[0]
        elif bad or number >= ROUNDS * len(ORDER) // 2:
            self._up = not self._up
            self._resting, self._rest = self._rest, min(2 * self._rest, REST[1])
        else:
            return
        self._changes.clear()
        self._aim()

    def _aim(self) -> None:
        """Choose what to try next."""
        self._other = self._next()
        if self._other == self.chunks:  # at a bound
            self._up = not self._up
            self._other = self._next()

    def _next(self) -> int:
        """One step from here; a whole chunk at least, or nothing would change."""
        if self._up:
            return min(max(math.floor(self.chunks * STEP), self.chunks + 1), self._most)
        return max(min(math.ceil(self.chunks / STEP), self.chunks - 1), self._least)

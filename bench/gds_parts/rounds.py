"""Cells measured: all contenders take a turn in each round, in an order drawn anew, and those that fail say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gds_parts.sizes import Cell
from gds_parts.turns import Contender, Turn
from gdsstore.errors import DeadlineError, GdsStoreError


@dataclass(frozen=True, slots=True)
class Missing:
    """What was not measured, and why. `submitters`: None for all (other) numbers of them. `cell`: where it failed, which ends
    it for all later cells with that many submitters; "" where it could not be opened."""

    contender: str
    submitters: int | None
    cell: str
    reason: str


class Seats:
    """The contenders that are open for one number of submitters. Who fails is closed, and out of all that follows."""

    def __init__(self, contenders: Sequence[Contender], submitters: int) -> None:
        self.open = list(contenders)
        self.missing: list[Missing] = []
        self.hung: list[str] = []  # a call of theirs may still hang: not to be opened again
        self._submitters = submitters

    def measure(self, cell: Cell, rounds: int, rng: np.random.Generator) -> dict[str, list[Turn]]:
        """The turns of a cell by contender, one a round, or fewer of those that take fewer. Who failed is not in it."""
        for each in list(self.open):
            self._attempt(each, cell, each.prove)
        turns: dict[str, list[Turn]] = {each.name: [] for each in self.open}
        for number in range(rounds):
            order = [self.open[at] for at in rng.permutation(len(self.open))]
            for each in order:
                if each.turns is None or number < each.turns:
                    turn = self._attempt(each, cell, each.turn)
                    if turn is not None:
                        turns[each.name].append(turn)
        return {each.name: turns[each.name] for each in self.open}

    def close(self) -> None:
        for each in self.open:
            each.close()
        self.open = []

    def _attempt(self, contender: Contender, cell: Cell, call: Callable[[Cell], Turn | None]) -> Turn | None:
        try:
            return call(cell)
        except (
            Exception
        ) as error:  # whatever it is, it is in the report, and hours of others' numbers are not lost
            self.missing.append(Missing(contender.name, self._submitters, str(cell), one_line(error)))
            if isinstance(error, DeadlineError):
                self.hung.append(contender.name)
            self.open.remove(contender)
            contender.close()
            return None


def one_line(error: Exception) -> str:
    """What it says; of errors that nobody foresaw, their type too."""
    text = " ".join(str(error).split())
    return text if isinstance(error, GdsStoreError) else f"{type(error).__name__}: {text}"

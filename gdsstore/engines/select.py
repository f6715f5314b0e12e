"""Which path the next transfer of a volume takes: decided by measurements, and by what transfers turned out to do.

Each cell (direction, record size, submitters; the last two by powers of two) takes one path. Seldom, and only while something
is not known well, one of its transfers tries another. A cell changes over only after several such tries in a row were faster by
a margin than what it takes now: so noise below the margin never changes anything, and a figure of another day alone neither.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path
from gdsstore.errors import ArgumentError
from gdsstore.sizes import format_size

log = logging.getLogger("gdsstore.engines")

NEVER = -math.inf
MIN_SECONDS = 1e-9  # less is a clock's error


class Measurement(NamedTuple):
    """What a path moved with `submitters` ranges of `record_bytes` bytes in flight at the same time."""

    op: Op
    record_bytes: int
    submitters: int
    path: Path
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    """When a path is tried and changed."""

    margin: float = 1.1  # how much faster another path has to be
    confirmations: int = 3  # tries in a row that have to say so
    weight: float = 0.2  # of a new transfer in a path's bandwidth, where the one before it was just now
    stale_s: float = 60.0  # what was heard of a path so long ago is looked at again
    try_every: int = 64  # at most one in that many transfers of a cell is a try,
    try_share: float = 0.02  # and at most this share of its bytes
    backoff_s: float = 5.0  # a path that failed is left alone so long, then twice as long, and so on,
    backoff_max_s: float = 300.0  # up to this


class CellState(NamedTuple):
    """A cell as it stands. `bytes_per_s`: of each path that something is known of."""

    op: Op
    record_bytes: int
    submitters: int
    path: Path
    bytes_per_s: dict[Path, float]


@dataclass(slots=True)
class _Rate:
    """Bandwidth of one path in one cell, as moving averages of bytes and seconds: so a transfer that took long weighs more."""

    bytes_per_s: float  # 0: not known
    heard_at: float
    live: bool = False  # whether transfers are in it, or only a measurement
    nbytes: float = 0.0
    seconds: float = 0.0
    streak: int = 0  # tries in a row that were faster by the margin

    def add(self, nbytes: int, seconds: float, now: float, rules: Rules) -> None:
        if not self.live:
            self.live = True
            self.nbytes = nbytes
            self.seconds = nbytes / self.bytes_per_s if self.bytes_per_s else seconds
        keep = (1 - rules.weight) * math.exp((self.heard_at - now) / rules.stale_s)
        self.nbytes = keep * self.nbytes + (1 - keep) * nbytes
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.bytes_per_s, self.heard_at = self.nbytes / self.seconds, now


@dataclass(slots=True)
class _Cell:
    taken: Path
    rates: dict[Path, _Rate]
    picked: int = 0  # since the last try
    trying_since: float = NEVER  # a try is under way
    nbytes: int = 0  # moved
    tried_bytes: int = 0  # of these, by paths that were not taken


@dataclass(slots=True)
class _Away:
    """A path that failed."""

    until: float
    pause_s: float
    good: int = 0  # transfers since it came back


_Key = tuple[Op, int, int]


class Selection:
    """The paths of one volume, for one device. Thread-safe; nothing here waits or does I/O.

    `paths`: the candidates, the preferred one first: it is taken where no other is measured faster by the margin, and where
    nothing is known. `clock`: seconds, rising. Raises ArgumentError without a candidate, or with one given twice.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        measurements: Iterable[Measurement] = (),
        *,
        rules: Rules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.paths = tuple(paths)
        if not self.paths or len(set(self.paths)) != len(self.paths):
            raise ArgumentError("a selection needs paths, each once", paths=", ".join(self.paths))
        self._rules = rules or Rules()
        self._clock = clock
        self._lock = threading.Lock()
        self._cells: dict[_Key, _Cell] = {}
        self._away: dict[tuple[Op, Path], _Away] = {}
        self._measured_at = clock()
        self._measured = [each for each in measurements if each.path in self.paths]

    def pick(self, op: Op, record_bytes: int, submitters: int) -> Path:
        """The path for a transfer with `submitters` ranges of `record_bytes` bytes each in flight: one of `paths`.

        Tell `moved` or `failed` how it went.
        """
        if len(self.paths) == 1:
            return self.paths[0]
        with self._lock:
            cell = self._cell(op, record_bytes, submitters)
            cell.picked += 1
            if cell.picked < self._rules.try_every:
                return cell.taken
            now = self._clock()
            other = self._due(op, cell, now)
            if other is None:
                return cell.taken
            cell.picked, cell.trying_since = 0, now
            return other

    def moved(
        self, op: Op, record_bytes: int, submitters: int, path: Path, nbytes: int, seconds: float
    ) -> None:
        """A transfer that `pick` was asked for moved `nbytes` bytes in `seconds` seconds. Other paths' are ignored."""
        if len(self.paths) == 1 or path not in self.paths or nbytes <= 0 or seconds <= 0:
            return
        seconds = max(seconds, MIN_SECONDS)
        with self._lock:
            now = self._clock()
            cell = self._cell(op, record_bytes, submitters)
            rate = cell.rates[path]
            rate.add(nbytes, seconds, now, self._rules)
            cell.nbytes += nbytes
            self._went_well(op, path, now)
            before = cell.taken
            if path is not before:
                cell.tried_bytes += nbytes
                cell.trying_since = NEVER
                self._judge(op, cell, path, nbytes / seconds, now)
            if cell.taken is before:
                return
            was = cell.rates[before].bytes_per_s
        log.info(
            "%s of %s, %d at once: %s instead of %s (%.2f instead of %.2f GB/s)",
            op.value,
            format_size(record_bytes),
            submitters,
            path,
            before,
            rate.bytes_per_s / 1e9,
            was / 1e9,
        )

    def failed(self, op: Op, path: Path) -> None:
        """Transfers on this path fail: other paths take its place, and it is tried again later."""
        if len(self.paths) == 1 or path not in self.paths:
            return
        with self._lock:
            now = self._clock()
            away = self._away.get((op, path))
            if away is not None and now < away.until:  # one fault ends many transfers
                return
            pause_s = (
                self._rules.backoff_s if away is None else min(2 * away.pause_s, self._rules.backoff_max_s)
            )
            self._away[op, path] = _Away(now + pause_s, pause_s)
            for (cell_op, _, _), cell in self._cells.items():
                if cell_op is op:
                    rate = cell.rates[path]
                    rate.heard_at, rate.streak, cell.trying_since = NEVER, 0, NEVER
                    if cell.taken is path:
                        cell.taken = self._best(op, cell.rates, now)
        log.warning("%s by path %s fails: it is left alone for %g s", op.value, path, pause_s)

    def cells(self) -> list[CellState]:
        """The cells that were asked for so far, and what they take."""
        with self._lock:
            return [
                CellState(
                    op,
                    1 << size,
                    1 << submitters,
                    cell.taken,
                    {path: rate.bytes_per_s for path, rate in cell.rates.items() if rate.bytes_per_s},
                )
                for (op, size, submitters), cell in self._cells.items()
            ]

    # --- with the lock held ---

    def _cell(self, op: Op, record_bytes: int, submitters: int) -> _Cell:
        key = (op, _log2(record_bytes), _log2(submitters))
        cell = self._cells.get(key)
        if cell is None:
            rates = {path: self._nearest(key, path) for path in self.paths}
            cell = self._cells[key] = _Cell(self._best(op, rates, self._clock()), rates)
        return cell

    def _nearest(self, key: _Key, path: Path) -> _Rate:
        op, size, submitters = key
        known = [each for each in self._measured if each.op is op and each.path is path]
        if not known:
            return _Rate(0.0, NEVER)
        near = min(
            known,
            key=lambda each: math.hypot(
                math.log2(each.record_bytes) - size, math.log2(each.submitters) - submitters
            ),
        )
        return _Rate(near.bytes_per_s, self._measured_at)

    def _best(self, op: Op, rates: dict[Path, _Rate], now: float) -> Path:
        here = [path for path in self.paths if not self._is_away(op, path, now)]
        if not here:
            return min(self.paths, key=lambda path: self._away[op, path].until)
        best = here[0]
        for path in here[1:]:
            if rates[path].bytes_per_s > self._rules.margin * rates[best].bytes_per_s:
                best = path
        return best

    def _due(self, op: Op, cell: _Cell, now: float) -> Path | None:
        """The path to try now, if any: the one that least is known of."""
        rules = self._rules
        if now - cell.trying_since < rules.stale_s:
            return None
        usual = cell.rates[cell.taken]
        # Not before the usual path was heard: there is nothing to compare with, and no bytes to take a share of.
        if not usual.live or cell.tried_bytes + usual.nbytes > rules.try_share * (cell.nbytes + usual.nbytes):
            return None
        due = [
            path
            for path, rate in cell.rates.items()
            if path is not cell.taken
            and not self._is_away(op, path, now)
            and (now - rate.heard_at >= rules.stale_s or rate.bytes_per_s > rules.margin * usual.bytes_per_s)
        ]
        return min(due, key=lambda path: cell.rates[path].heard_at, default=None)

    def _judge(self, op: Op, cell: _Cell, path: Path, bytes_per_s: float, now: float) -> None:
        """After a transfer by a path that is not taken: whether it is from now on."""
        rate, usual = cell.rates[path], cell.rates[cell.taken]
        enough = self._rules.margin * usual.bytes_per_s
        # A path that failed may still end what it had begun.
        here = usual.live and not self._is_away(op, path, now)
        rate.streak = rate.streak + 1 if here and min(bytes_per_s, rate.bytes_per_s) > enough else 0
        if rate.streak >= self._rules.confirmations:
            cell.taken = path
            for each in cell.rates.values():
                each.streak = 0

    def _is_away(self, op: Op, path: Path, now: float) -> bool:
        away = self._away.get((op, path))
        return away is not None and now < away.until

    def _went_well(self, op: Op, path: Path, now: float) -> None:
        away = self._away.get((op, path))
        if away is not None and now >= away.until:
            away.good += 1
            if away.good >= self._rules.confirmations:
                del self._away[op, path]


def _log2(number: int) -> int:
    """The logarithm of the nearest power of two, in the logarithm's sense: 5 is near 4, 6 near 8."""
    return ((2 * max(number, 1) ** 2).bit_length() - 1) // 2

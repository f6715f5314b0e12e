"""Rows of the result: medians over the rounds, and where the direct path loses against a bounce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gds_parts.sizes import Cell
from gds_parts.turns import DIRECT, LatencyOf, Memory, Turn

# A row is of the direct path where at least this share of its bytes was counted as direct.
DIRECT_SHARE = 0.99
# Closer than this is no difference: drives drift more from run to run.
EVEN = 0.05
WINS, IS_EVEN, LOSES, NO_DIRECT, NO_RIVAL = "wins", "even", "loses", "no direct path", "no other path"


@dataclass(frozen=True, slots=True)
class Row:
    """`gbps` and `cpu_s_per_gb`: medians over the rounds. Latencies: over all plans of all rounds, or (a program's) medians of
    what it said of each round. `paths`: share of the bytes by path, as counted. None: not to be had."""

    contender: str
    memory: Memory
    direction: str
    record_bytes: int
    submitters: int
    gbps: float
    gbps_rounds: list[float]
    cpu_s_per_gb: float | None
    latency_of: LatencyOf
    latency_p50_us: float | None
    latency_p99_us: float | None
    latency_samples: int
    dram_bytes_per_byte: float | None
    paths: dict[str, float]

    @property
    def is_direct(self) -> bool:
        return self.memory == "device" and self.paths.get(DIRECT, 0.0) >= DIRECT_SHARE

    @property
    def cell(self) -> tuple[str, int, int]:
        return self.direction, self.record_bytes, self.submitters


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best direct row of a cell beside the best other way into device memory, and beside the best into host memory.

    Ratios: medians of the rounds' own ratios of GB/s, direct by the other. Host memory is only half of the way to a GPU.
    """

    direction: str
    record_bytes: int
    submitters: int
    outcome: str
    direct: str | None
    rival: str | None
    ratio: float | None
    host: str | None
    ratio_to_host: float | None


def make_row(name: str, memory: Memory, latency_of: LatencyOf, cell: Cell, turns: Sequence[Turn]) -> Row:
    """`turns`: at least one."""
    latencies = np.concatenate([turn.latencies_us for turn in turns])
    told = [turn.percentiles_us for turn in turns if turn.percentiles_us is not None]
    p50: float | None = None
    p99: float | None = None
    if len(latencies):
        p50, p99 = (float(each) for each in np.percentile(latencies, (50, 99)))
    elif told:
        p50, p99 = (float(each) for each in np.median(np.array(told), axis=0))
    moved: Counter[str] = Counter()
    for turn in turns:
        moved.update(turn.paths)
    return Row(
        contender=name,
        memory=memory,
        direction=cell.op.value,
        record_bytes=cell.record_bytes,
        submitters=cell.submitters,
        gbps=_median(turn.gbps for turn in turns) or 0.0,
        gbps_rounds=[round(turn.gbps, 4) for turn in turns],
        cpu_s_per_gb=_median(turn.cpu_s_per_gb for turn in turns),
        latency_of=latency_of,
        latency_p50_us=None if p50 is None else round(p50, 1),
        latency_p99_us=None if p99 is None else round(p99, 1),
        latency_samples=len(latencies),
        dram_bytes_per_byte=_median(turn.dram_bytes_per_byte for turn in turns),
        paths={path: round(nbytes / max(1, moved.total()), 4) for path, nbytes in sorted(moved.items())},
    )


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One for each cell of the rows, in their order."""
    return [
        _verdict(cell, [row for row in rows if row.cell == cell])
        for cell in dict.fromkeys(r.cell for r in rows)
    ]


def _verdict(cell: tuple[str, int, int], rows: Sequence[Row]) -> Verdict:
    direct = _best(row for row in rows if row.is_direct)
    rival = _best(row for row in rows if row.memory == "device" and not row.is_direct)
    host = _best(row for row in rows if row.memory == "host")
    ratio = _ratio(direct, rival)
    if direct is None:
        outcome = NO_DIRECT
    elif ratio is None:
        outcome = NO_RIVAL
    else:
        outcome = LOSES if ratio < 1 - EVEN else WINS if ratio > 1 + EVEN else IS_EVEN
    names = [None if row is None else row.contender for row in (direct, rival, host)]
    return Verdict(*cell, outcome, names[0], names[1], ratio, names[2], _ratio(direct, host))


def _best(rows: Iterable[Row]) -> Row | None:
    return max(rows, key=lambda row: row.gbps, default=None)


def _ratio(one: Row | None, other: Row | None) -> float | None:
    if one is None or other is None:
        return None
    return _median(a / b for a, b in zip(one.gbps_rounds, other.gbps_rounds, strict=True))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.median(known)), 4) if known else None

"""Rows of `bench/gds_vs_bounce.py`: medians, where direct loses, and sizes that fit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.engines.base import Op
from gdsstore.sizes import KiB

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gds_parts.rows import IS_EVEN, LOSES, NO_DIRECT, NO_RIVAL, WINS, Row, make_row, verdicts
from gds_parts.sizes import FULL, QUICK, Cell, Sizes
from gds_parts.turns import Turn

READ = Cell(16 * KiB, 2, Op.READ, 8, 2)


def turn(gbps: float, path: str = "direct", **more: Any) -> Turn:
    return Turn(gbps, more.pop("cpu", 0.1), more.pop("paths", {path: 100}), **more)


def row(name: str, rounds: Sequence[float], path: str = "direct", memory: Any = "device") -> Row:
    return make_row(name, memory, "plan", READ, [turn(gbps, path) for gbps in rounds])


def test_a_row_is_the_median_of_its_rounds_and_an_outlier_does_not_move_it() -> None:
    made = make_row("x", "device", "plan", READ, [turn(1.0, cpu=3.0), turn(9.0, cpu=1.0), turn(2.0, cpu=2.0)])
    assert (made.gbps, made.cpu_s_per_gb) == (2.0, 2.0)
    assert made.gbps_rounds == [1.0, 9.0, 2.0]


def test_latencies_are_over_the_plans_of_all_rounds() -> None:
    halves = np.arange(50.0), np.arange(50.0, 101.0)
    made = make_row("x", "device", "plan", READ, [turn(1, latencies_us=half) for half in halves])
    assert (made.latency_p50_us, made.latency_p99_us, made.latency_samples) == (50.0, 99.0, 101)


def test_a_programs_own_percentiles_are_medians_of_its_rounds() -> None:
    told = [turn(1, percentiles_us=(each, 10 * each)) for each in (3.0, 1.0, 2.0)]
    made = make_row("fio", "reference", "record", READ, told)
    assert (made.latency_p50_us, made.latency_p99_us, made.latency_samples) == (2.0, 20.0, 0)


def test_what_was_not_told_is_none_and_not_zero() -> None:
    made = make_row("gdsio direct", "reference", "record", READ, [turn(1, cpu=None)])
    assert (made.cpu_s_per_gb, made.latency_p50_us, made.dram_bytes_per_byte) == (None, None, None)


def test_paths_are_shares_of_the_bytes_of_all_rounds() -> None:
    made = make_row(
        "x", "device", "plan", READ, [turn(1, paths={"direct": 300}), turn(1, paths={"compat": 100})]
    )
    assert made.paths == {"compat": 0.25, "direct": 0.75}
    assert not made.is_direct


@pytest.mark.parametrize(
    ("direct", "outcome"), [(0.94, LOSES), (0.96, IS_EVEN), (1.0, IS_EVEN), (1.04, IS_EVEN), (1.06, WINS)]
)
def test_direct_loses_where_it_is_more_than_the_drives_drift_behind(direct: float, outcome: str) -> None:
    (verdict,) = verdicts([row("kvikio direct", [direct] * 3), row("bounce (nixl)", [1.0] * 3, "bounce")])
    assert (verdict.outcome, verdict.ratio) == (outcome, direct)


def test_ratios_are_of_the_same_round_so_that_a_drift_of_the_drive_cancels_out() -> None:
    (verdict,) = verdicts(
        [row("kvikio direct", [4.0, 1.0, 2.0]), row("bounce (nixl)", [5.0, 1.25, 2.5], "bounce")]
    )
    assert verdict.ratio == 0.8


def test_the_best_direct_way_is_compared_with_the_best_other_one() -> None:
    rows = [row("kvikio direct", [1.0]), row("nixl-gds-mt", [2.0])]
    rows += [row("bounce (nixl)", [3.0], "bounce"), row("kvikio compat", [4.0], "compat")]
    (verdict,) = verdicts(rows)
    assert (verdict.direct, verdict.rival, verdict.ratio) == ("nixl-gds-mt", "kvikio compat", 0.5)


def test_a_direct_contender_that_fell_back_is_not_the_direct_path() -> None:
    (verdict,) = verdicts([row("kvikio direct", [9.0], "compat"), row("bounce (nixl)", [1.0], "bounce")])
    assert (verdict.outcome, verdict.direct, verdict.rival) == (NO_DIRECT, None, "kvikio direct")


def test_host_memory_and_programs_are_no_rivals() -> None:
    rows = [row("kvikio direct", [1.0]), row("posix", [4.0], "host", "host")]
    rows += [row("fio", [9.0], "host", "reference"), row("gdsio direct", [9.0], "direct", "reference")]
    (verdict,) = verdicts(rows)
    assert (verdict.outcome, verdict.rival) == (NO_RIVAL, None)
    assert (verdict.host, verdict.ratio_to_host) == ("posix", 0.25)


@given(
    st.integers(1, 4096),
    st.integers(1, 128),
    st.integers(1, 1 << 16),
    st.integers(1, 2000),
    st.integers(1, 64),
)
def test_a_turn_is_whole_plans_and_bounded(
    record: int, submitters: int, turn_blocks: int, each: int, plans: int
) -> None:
    sizes = Sizes((record * 4096,), (submitters,), 5, turn_blocks * 4096, each, plans, 1 << 40)
    for cell in sizes.cells(submitters):
        assert cell.count % submitters == 0
        assert cell.count >= submitters
        assert cell.plans * submitters <= cell.count
        assert cell.nbytes <= max(sizes.turn_bytes, submitters * cell.record_bytes)
        assert cell.nbytes <= sizes.memory_bytes(submitters)


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_the_file_has_room_for_every_turn_at_distinct_places(sizes: Sizes) -> None:
    assert sizes.rounds >= 5
    assert max(sizes.memory_bytes(each) for each in sizes.submitters) <= sizes.file_bytes // 2

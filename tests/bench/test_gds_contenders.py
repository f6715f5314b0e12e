"""Contenders of `bench/gds_vs_bounce.py`: wrong bytes, turns in rounds, and who fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.engines.base import Engine, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import DeadlineError, EngineError, GdsStoreError
from gdsstore.sizes import KiB, MiB

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gds_parts.contender import EngineContender
from gds_parts.places import HostPlace
from gds_parts.rounds import Seats
from gds_parts.sizes import Cell
from gds_parts.target import Target
from gds_parts.turns import Turn, WrongBytesError

READ = Cell(16 * KiB, 2, Op.READ, 8, 2)
WRITE = Cell(16 * KiB, 2, Op.WRITE, 8, 2)


class Told(Transfer):
    def __init__(self, results: RangeResults) -> None:
        self._results = results

    @property
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> RangeResults:
        return self._results


class Liar(Engine):
    """Says of every range what `say` makes of its length, and moves nothing."""

    name = "liar"

    def __init__(self, say: Callable[[RangePlan], RangeResults]) -> None:
        self._say = say

    def attach(self, fd: int, size: int) -> None: ...

    def detach(self, fd: int) -> None: ...

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        return Told(self._say(plan))

    def close(self, timeout_s: float) -> None: ...


def all_moved(plan: RangePlan) -> RangeResults:
    return RangeResults(plan.length.copy(), np.zeros(len(plan), np.int32))


def last_says(moved: int, code: int) -> Callable[[RangePlan], RangeResults]:
    def say(plan: RangePlan) -> RangeResults:
        results = all_moved(plan)
        results.moved[-1], results.errno[-1] = moved, code
        return results

    return say


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(tmp_path, 4 * MiB)


@pytest.fixture
def contend(target: Target) -> Any:
    opened: list[EngineContender] = []

    def make(engine: Engine) -> EngineContender:
        opened.append(EngineContender(engine.name, "host", engine, HostPlace(READ.nbytes), target, None))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_the_file_is_fully_written_and_its_blocks_differ(target: Target) -> None:
    assert target.path.stat().st_blocks * 512 >= target.size_bytes
    blocks = np.frombuffer(target.path.read_bytes(), np.uint8).reshape(-1, 4096)
    assert len(np.unique(blocks, axis=0)) == len(blocks)


@pytest.mark.parametrize("cell", [READ, WRITE], ids=str)
def test_an_engine_is_proved_and_timed(contend: Any, cell: Cell) -> None:
    posix = contend(PosixEngine(2))
    posix.prove(cell)
    taken = posix.turn(cell)
    assert taken.gbps > 0
    assert taken.cpu_s_per_gb is not None
    assert len(taken.latencies_us) == cell.plans
    assert taken.paths == {"host": cell.nbytes + cell.plans * cell.submitters * cell.record_bytes}


@pytest.mark.parametrize("cell", [READ, WRITE], ids=str)
def test_an_engine_that_moves_nothing_and_says_that_it_did_is_found_out(contend: Any, cell: Cell) -> None:
    with pytest.raises(WrongBytesError):
        contend(Liar(all_moved)).prove(cell)


@pytest.mark.parametrize(
    ("moved", "code", "error", "text"),
    [(0, 5, EngineError, "EIO"), (4096, 0, EngineError, "short"), (0, 110, DeadlineError, "1 of 8 records")],
)
def test_a_turn_with_a_range_that_did_not_move_is_no_number(
    contend: Any, moved: int, code: int, error: type[GdsStoreError], text: str
) -> None:
    with pytest.raises(error, match=text):
        contend(Liar(last_says(moved, code))).turn(READ)


class Scripted:
    """A contender that fails in turn number `fails_at` (0: when it is proved) with `error`."""

    memory: Any = "device"
    latency_of: Any = "plan"

    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        fails_at: int = -1,
        error: Exception | None = None,
        turns: int | None = None,
    ) -> None:
        self.name, self.turns = name, turns
        self.closed = 0
        self._log, self._fails_at, self._error, self._number = log, fails_at, error or EngineError("no"), 0

    def prove(self, cell: Cell) -> None:
        if self._fails_at == 0:
            raise self._error

    def turn(self, cell: Cell) -> Turn:
        self._number += 1
        if self._number == self._fails_at:
            raise self._error
        self._log.append(self.name)
        return Turn(1.0, 0.1, {"direct": 100})

    def close(self) -> None:
        self.closed += 1


def test_each_round_has_one_turn_of_every_contender_in_changing_order() -> None:
    log: list[str] = []
    seats = Seats([Scripted(name, log) for name in "abc"], 2)
    turns = seats.measure(READ, 12, np.random.default_rng(1))
    rounds = ["".join(log[at : at + 3]) for at in range(0, len(log), 3)]
    assert {name: len(taken) for name, taken in turns.items()} == dict.fromkeys("abc", 12)
    assert all(sorted(each) == list("abc") for each in rounds)
    assert len(set(rounds)) > 2


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("error", [EngineError("the drive is gone"), ValueError("the drive is gone")])
def test_a_contender_that_fails_is_out_with_its_reason_and_the_others_go_on(
    fails_at: int, error: Exception
) -> None:
    bad = Scripted("bad", [], fails_at=fails_at, error=error)
    good = Scripted("good", [])
    seats = Seats([bad, good], 2)
    turns = seats.measure(READ, 4, np.random.default_rng(1))
    assert {name: len(taken) for name, taken in turns.items()} == {"good": 4}
    assert set(seats.measure(WRITE, 4, np.random.default_rng(1))) == {"good"}
    (missing,) = seats.missing
    assert (missing.contender, missing.submitters, missing.cell) == ("bad", 2, str(READ))
    assert "the drive is gone" in missing.reason
    assert (bad.closed, good.closed, seats.hung) == (1, 0, [])


def test_a_contender_that_hangs_is_not_to_be_opened_again() -> None:
    seats = Seats([Scripted("stuck", [], fails_at=1, error=DeadlineError("no answer"))], 2)
    assert seats.measure(READ, 3, np.random.default_rng(1)) == {}
    assert seats.hung == ["stuck"]


def test_a_program_that_is_slow_to_start_takes_fewer_turns() -> None:
    seats = Seats([Scripted("fio", [], turns=3), Scripted("ours", [])], 2)
    turns = seats.measure(READ, 5, np.random.default_rng(1))
    assert {name: len(taken) for name, taken in turns.items()} == {"fio": 3, "ours": 5}

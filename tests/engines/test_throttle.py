"""A throttled engine is as slow as it was told, and honest about what moved."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsstore.engines.base import Op, RangePlan, Transfer
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.engines.throttle import ThrottledEngine
from gdsstore.errors import ConfigError, EngineError
from tests.engines.rig import BLOCK, TIMEOUT_S, Bytes, memory, move, open_file, plan, random_bytes

BLOCKS = 64
WHOLE_S = 0.2  # what the whole file takes
RATE = BLOCKS * BLOCK / WHOLE_S


class Clock:
    """A monotonic clock that goes on only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.real_sleep = time.sleep
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.real_sleep(1e-5)  # the inner engine's threads live in real time


class AtOnce(PosixEngine):
    """Moves within `submit`. On a clock that goes on while its threads wait for a processor, a drive would seem too slow."""

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        transfer = super().submit(op, plan)
        transfer.wait(TIMEOUT_S)
        assert transfer.done
        return transfer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def engine() -> Iterator[ThrottledEngine]:
    with ThrottledEngine(AtOnce(2), RATE) as engine:
        yield engine


@pytest.fixture
def fd(engine: ThrottledEngine, tmp_path: Path) -> Iterator[int]:
    fd = open_file(tmp_path / "file", BLOCKS * BLOCK, content=random_bytes(BLOCKS * BLOCK))
    engine.attach(fd, BLOCKS * BLOCK)
    yield fd
    engine.detach(fd)
    os.close(fd)


def whole(fd: int, buffer: Bytes) -> RangePlan:
    return plan(fd, [i * BLOCK for i in range(BLOCKS)], buffer, BLOCK)


def test_bytes_take_the_time_of_the_rate_and_arrive_whole(
    clock: Clock, engine: ThrottledEngine, fd: int, tmp_path: Path
) -> None:
    buffer = memory(BLOCKS * BLOCK)
    began_s = clock.now_s
    move(engine, Op.READ, whole(fd, buffer))
    assert WHOLE_S <= clock.now_s - began_s < 1.2 * WHOLE_S
    assert buffer.tobytes() == (tmp_path / "file").read_bytes()


def test_plans_share_the_rate_and_directions_do_not(clock: Clock, engine: ThrottledEngine, fd: int) -> None:
    first, second, written = memory(BLOCKS * BLOCK), memory(BLOCKS * BLOCK), random_bytes(BLOCKS * BLOCK, 1)
    began_s = clock.now_s
    transfers = [engine.submit(Op.READ, whole(fd, first)), engine.submit(Op.READ, whole(fd, second))]
    transfers[1].wait(TIMEOUT_S)
    assert 2 * WHOLE_S <= clock.now_s - began_s < 2.3 * WHOLE_S
    assert transfers[0].done  # though nobody looked after it
    began_s = clock.now_s
    move(engine, Op.WRITE, whole(fd, written))
    assert WHOLE_S <= clock.now_s - began_s < 1.2 * WHOLE_S


def test_an_idle_drive_saves_up_no_time(clock: Clock, engine: ThrottledEngine, fd: int) -> None:
    move(engine, Op.READ, whole(fd, memory(BLOCKS * BLOCK)))
    clock.now_s += 100.0
    began_s = clock.now_s
    move(engine, Op.READ, whole(fd, memory(BLOCKS * BLOCK)))
    assert clock.now_s - began_s >= WHOLE_S


def test_what_a_deadline_has_ended_is_never_moved(clock: Clock, engine: ThrottledEngine, fd: int) -> None:
    buffer = memory(BLOCKS * BLOCK)
    transfer = engine.submit(Op.READ, whole(fd, buffer))
    results = transfer.wait(WHOLE_S / 2)
    come = results.errno == 0
    assert 20 <= come.sum() <= 33
    assert set(results.errno[~come].tolist()) == {errno.ETIMEDOUT}
    while not transfer.done:  # what had begun may still end
        clock.sleep(0.001)
    kept = buffer.copy()
    clock.now_s += 10.0
    assert transfer.done
    assert np.array_equal(buffer, kept)
    began_s = clock.now_s
    move(engine, Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))
    assert clock.now_s - began_s < WHOLE_S / 5  # nobody queues behind what was given up


def test_time_that_was_given_up_is_not_taken_from_who_comes_next(
    clock: Clock, engine: ThrottledEngine, fd: int
) -> None:
    began_s = clock.now_s
    engine.submit(Op.READ, whole(fd, memory(BLOCKS * BLOCK))).wait(WHOLE_S / 4)
    move(engine, Op.READ, whole(fd, memory(BLOCKS * BLOCK)))
    assert clock.now_s - began_s < 1.5 * WHOLE_S


def test_errors_of_the_inner_engine_stay_with_their_ranges(tmp_path: Path) -> None:
    fault = Fault(FaultKind.ERRNO, match=lambda plan: plan.file_offset == 2 * BLOCK)
    with ThrottledEngine(FaultyEngine(PosixEngine(2), [fault], 0), 1e9) as engine:
        fd = open_file(tmp_path / "file", 4 * BLOCK)
        engine.attach(fd, 4 * BLOCK)
        ranges = plan(fd, [0, BLOCK, 2 * BLOCK, 3 * BLOCK], memory(4 * BLOCK), BLOCK)
        results = engine.submit(Op.READ, ranges).wait(TIMEOUT_S)
        assert results.errno.tolist() == [0, 0, errno.EIO, 0]
        assert results.moved.tolist() == [BLOCK, BLOCK, 0, BLOCK]
        engine.detach(fd)
        os.close(fd)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(16)), rate=st.sampled_from([1e6, 1e8, 1e12]))
def test_every_range_moves_once_at_any_rate(tmp_path: Path, order: list[int], rate: float) -> None:
    content = random_bytes(16 * BLOCK, 3)
    with ThrottledEngine(PosixEngine(2), rate) as engine:
        fd = open_file(tmp_path / "file", 16 * BLOCK, content=content)
        engine.attach(fd, 16 * BLOCK)
        buffer = memory(16 * BLOCK)
        move(engine, Op.READ, plan(fd, [i * BLOCK for i in order], buffer, BLOCK))
        got = buffer.reshape(16, BLOCK)
        assert np.array_equal(got, content.reshape(16, BLOCK)[order])
        engine.detach(fd)
        os.close(fd)


def test_a_plan_without_ranges_is_done_at_once(engine: ThrottledEngine, fd: int) -> None:
    transfer = engine.submit(Op.READ, plan(fd, [], memory(BLOCK), BLOCK))
    assert transfer.done
    assert len(transfer.wait(0.0).errno) == 0


def test_closing_waits_no_longer_than_it_was_told(clock: Clock, engine: ThrottledEngine, fd: int) -> None:
    transfer = engine.submit(Op.READ, whole(fd, memory(BLOCKS * BLOCK)))
    began_s = clock.now_s
    engine.close(WHOLE_S / 4)
    assert clock.now_s - began_s < WHOLE_S / 2
    transfer.wait(0.0)
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Op.READ, whole(fd, memory(BLOCKS * BLOCK)))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError):
        ThrottledEngine(PosixEngine(1), rate)

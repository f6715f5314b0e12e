"""The faulty engine: each fault does what it says, to the ranges it was meant for, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gdsstore.engines.base import Engine, Op, RangePlan, RangeResults
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine, Window, parse_faults
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import ConfigError, EngineError
from tests.engines.rig import BLOCK, TIMEOUT_S, Bytes, memory, move, new_nixl, open_file, plan, random_bytes

RANGES = 16
SIZE = 4 * BLOCK  # of a range
CONTENT = random_bytes(RANGES * SIZE, 5)
OFFSETS = [i * SIZE for i in range(RANGES)]


@pytest.fixture(params=["posix", "nixl"])
def inner(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with PosixEngine(2) if request.param == "posix" else new_nixl() as inner:
        yield inner


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """RANGES ranges of SIZE bytes, all different."""
    fd = open_file(tmp_path / "file", RANGES * SIZE, content=CONTENT)
    yield fd
    os.close(fd)


def faulty(inner: Engine, fd: int, *faults: Fault, seed: int = 1) -> FaultyEngine:
    engine = FaultyEngine(inner, faults, seed)
    engine.attach(fd, RANGES * SIZE)
    return engine


def read_all(engine: Engine, fd: int) -> tuple[RangePlan, RangeResults, Bytes]:
    buffer = memory(RANGES * SIZE)
    ranges = plan(fd, OFFSETS, buffer, SIZE)
    transfer = engine.submit(Op.READ, ranges)
    results = transfer.wait(TIMEOUT_S)
    assert transfer.done
    return ranges, results, buffer.reshape(RANGES, SIZE)


def rows(content: bytes | Bytes) -> Bytes:
    return np.frombuffer(content, np.uint8).reshape(RANGES, SIZE)


def differing_bits(a: Bytes, b: Bytes) -> list[int]:
    """Bits that differ, by row."""
    return np.unpackbits(a ^ b, axis=1).sum(axis=1).tolist()


def test_errno_fails_the_range_and_moves_nothing(inner: Engine, fd: int, tmp_path: Path) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.ERRNO, probability=0.3, errno_code=errno.ENOSPC))
    ranges, results, buffer = read_all(engine, fd)
    failed = results.errno == errno.ENOSPC
    assert 0 < failed.sum() < RANGES
    assert np.array_equal(results.complete(ranges), ~failed)
    assert not results.moved[failed].any()
    assert not buffer[failed].any()
    assert np.array_equal(buffer[~failed], rows(CONTENT)[~failed])
    assert engine.injected["errno"] == failed.sum()

    new = random_bytes(RANGES * SIZE, 6)
    results = engine.submit(Op.WRITE, plan(fd, OFFSETS, new, SIZE)).wait(TIMEOUT_S)
    failed = results.errno == errno.ENOSPC
    file = rows((tmp_path / "file").read_bytes())
    assert np.array_equal(file[failed], rows(CONTENT)[failed])
    assert np.array_equal(file[~failed], rows(new)[~failed])


def test_short_leaves_the_tail_and_is_no_error(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.SHORT, match=Window(fd, 2 * SIZE, 3 * SIZE)))
    ranges, results, buffer = read_all(engine, fd)
    assert not results.errno.any()
    assert np.flatnonzero(~results.complete(ranges)).tolist() == [2]
    moved = int(results.moved[2])
    assert 0 < moved < SIZE
    assert np.array_equal(buffer[2, :moved], rows(CONTENT)[2, :moved])
    assert not buffer[2, moved:].any()


def test_a_single_block_that_is_short_moves_nothing(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.SHORT))
    results = engine.submit(Op.READ, plan(fd, [0], memory(BLOCK), BLOCK)).wait(TIMEOUT_S)
    assert (results.moved.tolist(), results.errno.tolist()) == ([0], [0])


def test_corrupt_flips_a_bit_and_reports_success(inner: Engine, fd: int, tmp_path: Path) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.CORRUPT, match=Window(fd, 0, 3 * SIZE)))
    ranges, results, buffer = read_all(engine, fd)
    assert results.complete(ranges).all()
    assert differing_bits(buffer, rows(CONTENT)) == [1] * 3 + [0] * (RANGES - 3)
    assert (tmp_path / "file").read_bytes() == CONTENT.tobytes()

    new = random_bytes(RANGES * SIZE, 6)
    move(engine, Op.WRITE, plan(fd, OFFSETS, new, SIZE))
    assert np.array_equal(new, random_bytes(RANGES * SIZE, 6)), "the caller's memory is not touched"
    assert differing_bits(rows((tmp_path / "file").read_bytes()), rows(new)) == [1] * 3 + [0] * (RANGES - 3)
    assert engine.injected["corrupt"] == 6


def test_a_misdirected_read_gives_the_neighbours_bytes(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.MISDIRECT))
    ranges, results, buffer = read_all(engine, fd)
    assert results.complete(ranges).all()
    assert np.array_equal(buffer[:-1], rows(CONTENT)[1:])
    assert np.array_equal(buffer[-1], rows(CONTENT)[-2]), "the last range has only one neighbour"


def test_a_misdirected_write_hits_the_neighbour_and_misses_its_place(
    inner: Engine, fd: int, tmp_path: Path
) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.MISDIRECT, op=Op.WRITE))
    new = random_bytes(SIZE, 6)
    move(engine, Op.WRITE, plan(fd, [3 * SIZE], new, SIZE))
    file = rows((tmp_path / "file").read_bytes())
    assert np.array_equal(file[4], new)
    assert np.array_equal(np.delete(file, 4, 0), np.delete(rows(CONTENT), 4, 0))


def test_a_misdirected_write_without_a_neighbour_is_lost(inner: Engine, fd: int, tmp_path: Path) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.MISDIRECT))
    move(engine, Op.WRITE, plan(fd, [0], random_bytes(RANGES * SIZE, 6), RANGES * SIZE))
    assert (tmp_path / "file").read_bytes() == CONTENT.tobytes()


def test_delay_holds_back_the_range_and_no_other(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.DELAY, match=Window(fd, 0, SIZE), delay_s=3600.0))
    transfer = engine.submit(Op.READ, ranges := plan(fd, OFFSETS, memory(RANGES * SIZE), SIZE))
    for _ in range(100):
        results = transfer.wait(0.02)
        if results.complete(ranges)[1:].all():
            break
    assert results.complete(ranges).tolist() == [False] + [True] * (RANGES - 1)
    assert results.errno[0] == errno.ETIMEDOUT
    assert not transfer.done


def test_delay_ends(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.DELAY, delay_s=0.05))
    ranges, results, buffer = read_all(engine, fd)
    assert results.complete(ranges).all()
    assert buffer.tobytes() == CONTENT.tobytes()
    assert engine.injected["delay"] == RANGES


def test_hang_lasts_until_it_is_released(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.HANG, match=Window(fd, 0, SIZE), limit=1))
    buffer = memory(RANGES * SIZE)
    transfer = engine.submit(Op.READ, ranges := plan(fd, OFFSETS, buffer, SIZE))
    results = transfer.wait(0.2)
    assert results.errno[0] == errno.ETIMEDOUT
    assert not transfer.done
    assert not buffer[:SIZE].any()
    _, others, _ = read_all(engine, fd)  # the limit is reached
    assert not others.errno.any()
    engine.release_hangs()
    assert transfer.wait(TIMEOUT_S).complete(ranges).all()
    assert transfer.done
    assert buffer.tobytes() == CONTENT.tobytes()


def test_release_lets_go_only_of_what_hangs_already(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.HANG))
    engine.release_hangs()
    transfer = engine.submit(Op.READ, plan(fd, [0], memory(SIZE), SIZE))
    assert transfer.wait(0.02).errno.tolist() == [errno.ETIMEDOUT]
    assert not transfer.done


def test_close_does_not_wait_longer_than_asked_for_what_hangs(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.HANG))
    transfer = engine.submit(Op.READ, ranges := plan(fd, [0], memory(SIZE), SIZE))
    engine.close(0.05)
    engine.close(0.05)
    assert not transfer.done
    engine.release_hangs()
    assert transfer.wait(TIMEOUT_S).errno.tolist() == [errno.EIO], "the inner engine is closed"
    with pytest.raises(EngineError):
        engine.submit(Op.READ, ranges)


def test_the_same_seed_hits_the_same_ranges(inner: Engine, fd: int) -> None:
    faults = parse_faults("errno:0.2, short:0.2, corrupt:0.2")

    def outcome(seed: int) -> list[object]:
        engine = FaultyEngine(inner, faults, seed)
        inner.detach(fd)
        engine.attach(fd, RANGES * SIZE)
        found: list[object] = []
        for _ in range(3):
            _, results, buffer = read_all(engine, fd)
            found += [results.errno.tolist(), results.moved.tolist(), buffer.tobytes()]
        return found

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


def test_a_range_is_hit_by_one_fault_and_each_is_counted(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.SHORT, limit=3), Fault(FaultKind.ERRNO))
    _, results, _ = read_all(engine, fd)
    assert results.errno.tolist() == [0] * 3 + [errno.EIO] * (RANGES - 3)
    assert engine.injected == {"errno": 13, "short": 3, "corrupt": 0, "misdirect": 0, "delay": 0, "hang": 0}


def test_a_fault_keeps_to_its_direction(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.ERRNO, op=Op.WRITE))
    ranges, results, buffer = read_all(engine, fd)
    assert results.complete(ranges).all()
    results = engine.submit(Op.WRITE, plan(fd, OFFSETS, buffer, SIZE)).wait(TIMEOUT_S)
    assert (results.errno == errno.EIO).all()


def test_faults_of_the_inner_engine_come_through(inner: Engine, fd: int) -> None:
    engine = faulty(inner, fd, Fault(FaultKind.ERRNO, match=Window(fd, 0, SIZE)))
    ranges = plan(fd, [0, SIZE, RANGES * SIZE], memory(3 * SIZE), SIZE)
    results = engine.submit(Op.READ, ranges).wait(TIMEOUT_S)
    assert results.errno.tolist() == [errno.EIO, 0, 0]
    assert results.moved.tolist() == [0, SIZE, 0]


def test_faults_are_read_from_text() -> None:
    assert parse_faults("errno:0.02,short:0.01, corrupt:1e-2,delay:0.01,hang:0,misdirect:1") == (
        Fault(FaultKind.ERRNO, probability=0.02),
        Fault(FaultKind.SHORT, probability=0.01),
        Fault(FaultKind.CORRUPT, probability=0.01),
        Fault(FaultKind.DELAY, probability=0.01),
        Fault(FaultKind.HANG, probability=0.0),
        Fault(FaultKind.MISDIRECT, probability=1.0),
    )
    assert parse_faults("errno:0.5:ENOSPC,delay:0.5:1.5") == (
        Fault(FaultKind.ERRNO, probability=0.5, errno_code=errno.ENOSPC),
        Fault(FaultKind.DELAY, probability=0.5, delay_s=1.5),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("erno:0.1", "did you mean errno"),
        ("fire:0.1", "there are errno, short"),
        ("errno", "KIND:PROBABILITY"),
        ("short:0.1:2", "KIND:PROBABILITY"),
        ("errno:lots", "not a number"),
        ("errno:1.5", "between 0 and 1"),
        ("errno:nan", "between 0 and 1"),
        ("errno:0.1:EFOO", "ENOSPC"),
        ("delay:0.1:-1", "number of seconds"),
    ],
)
def test_faults_that_make_no_sense_are_refused_with_a_hint(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_faults(text)

"""What every engine promises in `engines/base.py`."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsstore.engines.base import Engine, Op
from gdsstore.errors import ArgumentError, EngineError
from tests.engines.on_device import OnDevice
from tests.engines.rig import (
    ALL_ENGINES,
    BLOCK,
    TIMEOUT_S,
    is_direct,
    make,
    memory,
    move,
    open_file,
    plan,
    random_bytes,
)

FILE_BLOCKS = 64


@pytest.fixture(params=ALL_ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make(request.param, request) as engine:
        yield engine


@pytest.fixture
def fd(engine: Engine, tmp_path: Path) -> Iterator[int]:
    """An attached file of FILE_BLOCKS blocks with known bytes."""
    fd = open_file(tmp_path / "file", FILE_BLOCKS * BLOCK, content=random_bytes(FILE_BLOCKS * BLOCK))
    engine.attach(fd, FILE_BLOCKS * BLOCK)
    yield fd
    engine.detach(fd)
    os.close(fd)


@st.composite
def disjoint_ranges(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(file, first block, blocks), in any order."""
    cuts = draw(st.lists(st.integers(0, 2 * FILE_BLOCKS), min_size=2, max_size=40, unique=True).map(sorted))
    ranges = []
    for start, stop in itertools.pairwise(cuts):
        file = start // FILE_BLOCKS
        stop = min(stop, (file + 1) * FILE_BLOCKS)
        ranges.append((file, start % FILE_BLOCKS, stop - start))
    return draw(st.permutations([entry for entry in ranges if entry[2] > 0]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=disjoint_ranges(), seed=st.integers(0, 1 << 30))
def test_bytes_arrive_where_the_plan_says(
    engine: Engine, tmp_path: Path, ranges: list[tuple[int, int, int]], seed: int
) -> None:
    truth = [bytearray(FILE_BLOCKS * BLOCK), bytearray(FILE_BLOCKS * BLOCK)]
    fds = [open_file(tmp_path / str(i), FILE_BLOCKS * BLOCK) for i in range(2)]
    for fd in fds:
        engine.attach(fd, FILE_BLOCKS * BLOCK)
    written = random_bytes(2 * FILE_BLOCKS * BLOCK, seed)
    lengths = [blocks * BLOCK for _, _, blocks in ranges]
    places = [fds[file] for file, _, _ in ranges], [start * BLOCK for _, start, _ in ranges]
    at = 0
    for (file, start, _), length in zip(ranges, lengths, strict=True):
        truth[file][start * BLOCK : start * BLOCK + length] = written[at : at + length].tobytes()
        at += length

    move(engine, Op.WRITE, plan(*places, written, lengths))
    assert [(tmp_path / str(i)).read_bytes() for i in range(2)] == truth
    read = memory(len(written))
    move(engine, Op.READ, plan(*places, read, lengths))
    assert np.array_equal(read[:at], written[:at])
    assert not read[at:].any()
    for fd in fds:
        engine.detach(fd)
        os.close(fd)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("trouble", ["closed fd", "unattached fd", "misaligned"])
def test_an_error_hits_its_range_and_no_other(
    engine: Engine, fd: int, tmp_path: Path, op: Op, trouble: str
) -> None:
    buffer = random_bytes(5 * BLOCK, 1)
    if op is Op.READ:
        buffer[:] = 0
    ranges = plan(fd, [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK], buffer, BLOCK)
    wanted = errno.EBADF
    if trouble == "misaligned":
        if not is_direct(fd):
            pytest.skip("no O_DIRECT here")
        if isinstance(engine, OnDevice):
            pytest.skip("engines for device memory move it, and count it as not direct")
        ranges.file_offset[2] += 1
        wanted = errno.EINVAL
    else:
        ranges.fd[2] = os.open(tmp_path / "file", os.O_RDWR)
        if trouble == "closed fd":
            engine.attach(int(ranges.fd[2]), FILE_BLOCKS * BLOCK)
            os.close(int(ranges.fd[2]))
    before = (tmp_path / "file").read_bytes()

    transfer = engine.submit(op, ranges)
    results = transfer.wait(TIMEOUT_S)

    assert transfer.done
    assert results.complete(ranges).tolist() == [True, True, False, True, True]
    assert results.errno.tolist() == [0, 0, wanted, 0, 0]
    assert results.moved[2] == 0
    after = (tmp_path / "file").read_bytes()
    assert after[2 * BLOCK : 3 * BLOCK] == before[2 * BLOCK : 3 * BLOCK]
    for i in (0, 1, 3, 4):
        assert after[i * BLOCK : (i + 1) * BLOCK] == buffer[i * BLOCK : (i + 1) * BLOCK].tobytes()
    if trouble == "unattached fd":
        os.close(int(ranges.fd[2]))


def test_a_file_opened_for_reading_is_not_written(engine: Engine, tmp_path: Path) -> None:
    fd = open_file(tmp_path / "file", 4 * BLOCK, flags=os.O_RDONLY)
    engine.attach(fd, 4 * BLOCK)
    results = engine.submit(Op.WRITE, plan(fd, [0, 2 * BLOCK], random_bytes(2 * BLOCK), BLOCK)).wait(
        TIMEOUT_S
    )
    assert results.errno.tolist() == [errno.EBADF, errno.EBADF]
    assert results.moved.tolist() == [0, 0]
    engine.detach(fd)
    os.close(fd)


@pytest.mark.parametrize("attached", [3 * BLOCK, 8 * BLOCK])
@pytest.mark.parametrize("size", [3 * BLOCK, 2 * BLOCK + 100])
def test_a_read_past_the_end_is_short_and_no_error(
    engine: Engine, tmp_path: Path, size: int, attached: int
) -> None:
    content = random_bytes(3 * BLOCK, 2)
    fd = open_file(tmp_path / "file", size, content=content[:size])
    engine.attach(fd, attached)
    buffer = memory(8 * BLOCK)
    results = engine.submit(Op.READ, plan(fd, [0, 2 * BLOCK, 4 * BLOCK], buffer, 2 * BLOCK)).wait(TIMEOUT_S)
    assert results.errno.tolist() == [0, 0, 0]
    assert results.moved.tolist() == [2 * BLOCK, size - 2 * BLOCK, 0]
    assert np.array_equal(buffer[:size], content[:size])
    engine.detach(fd)
    os.close(fd)


def test_ranges_of_any_size_move_through_a_buffered_file(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100_000))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    engine.attach(fd, 100_000)
    lengths = [1, 4095, 3, 70_000, 17]
    offsets = [99_999, 5, 4100, 10_000, 4]
    offsets[4] = 90_000
    written = random_bytes(sum(lengths), 3)
    move(engine, Op.WRITE, plan(fd, offsets, written, lengths))
    read = memory(len(written))
    move(engine, Op.READ, plan(fd, offsets, read, lengths))
    assert np.array_equal(read, written)
    engine.detach(fd)
    os.close(fd)


def test_a_plan_of_many_ranges_moves_whole(engine: Engine, tmp_path: Path) -> None:
    n = 1500  # more than may be in flight, and more than one call takes
    written = random_bytes(n * BLOCK, 4)
    fd = open_file(tmp_path / "file", n * BLOCK)
    engine.attach(fd, n * BLOCK)
    move(engine, Op.WRITE, plan(fd, [i * BLOCK for i in range(n)], written, BLOCK))
    read = memory(n * BLOCK)
    move(engine, Op.READ, plan(fd, [i * BLOCK for i in range(n)], read, BLOCK))
    assert np.array_equal(read, written)
    engine.detach(fd)
    os.close(fd)


def test_threads_move_their_own_plans_at_the_same_time(engine: Engine, tmp_path: Path) -> None:
    wrong: list[object] = []

    def work(thread: int) -> None:
        try:
            fd = open_file(tmp_path / f"file-{thread}", 128 * BLOCK)
            engine.attach(fd, 128 * BLOCK)
            for turn in range(8):
                offsets = np.random.default_rng(turn).permutation(128)[:100] * BLOCK
                written, read = random_bytes(100 * BLOCK, 10 * thread + turn), memory(100 * BLOCK)
                move(engine, Op.WRITE, plan(fd, offsets.tolist(), written, BLOCK))
                halves = [slice(0, 50), slice(50, 100)]
                ranges = plan(fd, offsets.tolist(), read, BLOCK)
                transfers = [engine.submit(Op.READ, ranges.take(half)) for half in halves]
                for transfer, half in zip(transfers, halves, strict=True):
                    assert transfer.wait(TIMEOUT_S).complete(ranges.take(half)).all()
                assert np.array_equal(read, written)
            engine.detach(fd)
            os.close(fd)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_an_empty_plan_is_done(engine: Engine, fd: int) -> None:
    transfer = engine.submit(Op.READ, plan(fd, [], memory(BLOCK), BLOCK))
    assert transfer.done
    assert len(transfer.wait(0.0).moved) == 0


def test_waiting_again_gives_the_same_results(engine: Engine, fd: int) -> None:
    ranges = plan(fd, [0, FILE_BLOCKS * BLOCK], memory(2 * BLOCK), BLOCK)
    transfer = engine.submit(Op.READ, ranges)
    first, second = transfer.wait(TIMEOUT_S), transfer.wait(0.0)
    assert first.moved.tolist() == second.moved.tolist() == [BLOCK, 0]
    assert first.errno.tolist() == second.errno.tolist() == [0, 0]


def test_done_comes_without_waiting(engine: Engine, fd: int) -> None:
    transfer = engine.submit(Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))
    pause = threading.Event()
    for _ in range(2000):
        if transfer.done:
            break
        pause.wait(0.005)
    assert transfer.done


def test_a_reused_descriptor_is_the_new_file(engine: Engine, tmp_path: Path) -> None:
    for seed in (1, 2):
        content = random_bytes(2 * BLOCK, seed)
        fd = open_file(tmp_path / str(seed), 2 * BLOCK, content=content)
        engine.attach(fd, 2 * BLOCK)
        read = memory(2 * BLOCK)
        move(engine, Op.READ, plan(fd, [0], read, 2 * BLOCK))
        assert np.array_equal(read, content)
        engine.detach(fd)
        os.close(fd)


def test_attaching_twice_is_an_error_and_detaching_the_unknown_is_not(engine: Engine, fd: int) -> None:
    with pytest.raises(ArgumentError):
        engine.attach(fd, BLOCK)
    engine.detach(fd + 1000)
    move(engine, Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))


def test_nothing_is_submitted_after_close(engine: Engine, fd: int) -> None:
    transfer = engine.submit(Op.READ, ranges := plan(fd, [0], memory(BLOCK), BLOCK))
    engine.close(TIMEOUT_S)
    engine.close(TIMEOUT_S)
    assert transfer.done
    assert transfer.wait(0.0).complete(ranges).all()
    with pytest.raises(EngineError):
        engine.submit(Op.READ, ranges)


@pytest.mark.parametrize("maker", ALL_ENGINES)
def test_a_closed_engine_leaves_no_descriptor_and_no_thread(
    maker: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    def use() -> None:
        with make(maker, request) as engine:
            fd = open_file(tmp_path / "file", 4 * BLOCK)
            engine.attach(fd, 4 * BLOCK)
            ranges = plan(fd, [0, 8 * BLOCK, 0], memory(3 * BLOCK), BLOCK)
            ranges.address[2] = 0
            results = engine.submit(Op.READ, ranges).wait(TIMEOUT_S)
            assert results.errno.tolist() == [0, 0, errno.EFAULT]
            engine.detach(fd)
            os.close(fd)

    use()  # what is made once for good
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        use()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before

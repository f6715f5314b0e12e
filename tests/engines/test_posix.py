"""The posix engine: how it cuts plans into calls, and what it does when the kernel hangs."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gdsstore.engines.base import Op
from gdsstore.engines.posix import IOV_MAX, RUN_BYTES, PosixEngine, run_starts
from tests.engines.rig import (
    BLOCK,
    TIMEOUT_S,
    HangingMemory,
    is_direct,
    memory,
    move,
    open_file,
    plan,
    random_bytes,
)


def starts(fd: list[int], offset: list[int], length: list[int]) -> list[int]:
    return run_starts(np.array(fd, np.int32), np.array(offset, np.int64), np.array(length, np.int64)).tolist()


def test_only_neighbours_in_one_file_share_a_call() -> None:
    assert starts([], [], []) == []
    assert starts([3, 3, 3], [0, 10, 20], [10, 10, 10]) == [0]
    assert starts([3, 3, 4], [0, 10, 20], [10, 10, 10]) == [0, 2]
    assert starts([3, 3, 3], [0, 11, 21], [10, 10, 10]) == [0, 1]
    assert starts([3, 3, 3], [20, 10, 0], [10, 10, 10]) == [0, 1, 2]


def test_a_call_has_no_more_buffers_than_the_kernel_takes() -> None:
    n = 2 * IOV_MAX + 1
    assert starts([3] * n, list(range(n)), [1] * n) == [0, IOV_MAX, 2 * IOV_MAX]


def test_long_runs_are_shared_among_threads() -> None:
    quarter = RUN_BYTES // 4
    assert starts([3] * 9, [i * quarter for i in range(9)], [quarter] * 9) == [0, 4, 8]
    assert starts([3] * 3, [0, quarter, 9 * quarter], [quarter, 8 * quarter, RUN_BYTES]) == [0, 1, 2]


@pytest.fixture
def engine() -> Iterator[PosixEngine]:
    with PosixEngine(2) as engine:
        yield engine


def test_each_range_of_a_call_that_ends_early_has_its_own_bytes(engine: PosixEngine, tmp_path: Path) -> None:
    size = 5 * BLOCK + 300
    content = random_bytes(6 * BLOCK)[:size]
    (tmp_path / "file").write_bytes(content.tobytes())
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    engine.attach(fd, size)
    buffer = memory(8 * BLOCK)
    results = engine.submit(Op.READ, plan(fd, [i * 2 * BLOCK for i in range(4)], buffer, 2 * BLOCK)).wait(
        TIMEOUT_S
    )
    assert results.moved.tolist() == [2 * BLOCK, 2 * BLOCK, BLOCK + 300, 0]
    assert results.errno.tolist() == [0, 0, 0, 0]
    assert np.array_equal(buffer[:size], content)
    os.close(fd)


def test_a_bad_address_in_the_middle_of_a_call_hits_one_range(engine: PosixEngine, tmp_path: Path) -> None:
    fd = open_file(tmp_path / "file", 4 * BLOCK, content=(content := random_bytes(4 * BLOCK)))
    engine.attach(fd, 4 * BLOCK)
    buffer = memory(4 * BLOCK)
    ranges = plan(fd, [i * BLOCK for i in range(4)], buffer, BLOCK)
    ranges.address[1] = 64 * BLOCK  # nothing is mapped that low
    results = engine.submit(Op.READ, ranges).wait(TIMEOUT_S)
    assert results.errno.tolist() == [0, errno.EFAULT, 0, 0]
    assert results.moved.tolist() == [BLOCK, 0, BLOCK, BLOCK]
    assert np.array_equal(buffer[2 * BLOCK :], content[2 * BLOCK :])
    os.close(fd)


def test_a_misaligned_buffer_in_the_middle_of_a_call_hits_one_range(
    engine: PosixEngine, tmp_path: Path
) -> None:
    fd = open_file(tmp_path / "file", 3 * BLOCK)
    if not is_direct(fd):
        pytest.skip("no O_DIRECT here")
    engine.attach(fd, 3 * BLOCK)
    ranges = plan(fd, [0, BLOCK, 2 * BLOCK], memory(4 * BLOCK), BLOCK)
    ranges.address[1] += 1
    ranges.address[2] += BLOCK
    results = engine.submit(Op.READ, ranges).wait(TIMEOUT_S)
    assert results.errno.tolist() == [0, errno.EINVAL, 0]
    os.close(fd)


def test_a_wait_ends_by_its_deadline_while_the_kernel_hangs(engine: PosixEngine, tmp_path: Path) -> None:
    content = random_bytes(8 * BLOCK)
    fd = open_file(tmp_path / "file", 8 * BLOCK, content=content)
    engine.attach(fd, 8 * BLOCK)
    hanging, good = HangingMemory(2), memory(BLOCK)
    # Two threads hang, so that what comes after them is never begun.
    offsets = [0, 2 * BLOCK, 4 * BLOCK]
    ranges = plan(fd, offsets, good, BLOCK)
    ranges.address[:2] = [hanging.bytes.ctypes.data, hanging.bytes.ctypes.data + BLOCK]
    try:
        transfer = engine.submit(Op.READ, ranges)
        hanging.touched(2)
        results = transfer.wait(0.1)
        assert results.errno.tolist() == [errno.ETIMEDOUT] * 3
        assert not transfer.done
    finally:
        hanging.release()
    late = transfer.wait(TIMEOUT_S)
    assert transfer.done
    assert late.moved.tolist() == [BLOCK, BLOCK, 0]
    assert late.errno.tolist() == [0, 0, errno.ETIMEDOUT]
    assert np.array_equal(hanging.bytes[:BLOCK], content[:BLOCK])
    assert not good.any()
    move(engine, Op.READ, plan(fd, offsets, memory(3 * BLOCK), BLOCK))
    os.close(fd)


def test_close_ends_by_its_deadline_and_says_that_calls_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fd = open_file(tmp_path / "file", 2 * BLOCK)
    engine = PosixEngine(1)
    engine.attach(fd, 2 * BLOCK)
    hanging = HangingMemory(1)
    try:
        transfer = engine.submit(Op.READ, plan(fd, [0], hanging.bytes, BLOCK))
        hanging.touched(1)
        behind = engine.submit(Op.READ, plan(fd, [BLOCK], memory(BLOCK), BLOCK))
        with caplog.at_level(logging.WARNING, "gdsstore.engines"):
            engine.close(0.5)
        assert "1 calls had not ended" in caplog.text
        assert not transfer.done
    finally:
        hanging.release()
    assert transfer.wait(TIMEOUT_S).errno.tolist() == [0]
    assert behind.wait(0.1).errno.tolist() == [errno.ETIMEDOUT]
    assert behind.done
    os.close(fd)


def test_the_process_exits_while_a_call_hangs(tmp_path: Path) -> None:
    HangingMemory(1).release()  # skips where it cannot be done
    script = f"""
from pathlib import Path
from tests.engines.rig import *
fd = open_file(Path({str(tmp_path / "file")!r}), BLOCK)
engine = PosixEngine(1)
engine.attach(fd, BLOCK)
hanging = HangingMemory(1)
print(engine.submit(Op.READ, plan(fd, [0], hanging.bytes, BLOCK)).wait(0.1).errno.tolist())
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == f"[{errno.ETIMEDOUT}]\n", ended.stderr
    assert ended.returncode == 0

"""The faulty engine around engines for device memory: each fault does there what it does to host memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from types import ModuleType

import numpy as np
import pytest

from gdsstore.engines.base import Op, RangeResults
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.faults import Fault, FaultKind, Window
from gdsstore.engines.faulty_device import FaultyDeviceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.paths import Path
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import ArgumentError, DeviceError, EngineError
from gdsstore.memory.device_arena import DeviceArena
from tests.cudasim.fixtures import need
from tests.engines.bounce_rig import POISON, DeviceBytes, until
from tests.engines.rig import BLOCK, TIMEOUT_S, Bytes, memory, open_file, random_bytes

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE)
RANGES = 16
SIZE = 4 * BLOCK  # of a range
CONTENT = random_bytes(RANGES * SIZE, 5)
OFFSETS = [i * SIZE for i in range(RANGES)]

Faulty = Callable[..., FaultyDeviceEngine]


@pytest.fixture(params=["kvikio", "bounce"])
def inner(gpu: ModuleType, request: pytest.FixtureRequest) -> DeviceEngine:
    if request.param == "bounce":
        return BounceEngine(PosixEngine(2), arena_bytes=4 << 20)
    need("kvikio")
    return KvikioEngine(2)


@pytest.fixture
def fd(tmp_path: FilePath) -> Iterator[int]:
    """RANGES ranges of SIZE bytes, all different."""
    fd = open_file(tmp_path / "file", RANGES * SIZE, content=CONTENT)
    yield fd
    os.close(fd)


@pytest.fixture
def faulty(inner: DeviceEngine, fd: int) -> Iterator[Faulty]:
    """Makes the engine with faults; closed in the end."""
    made: list[FaultyDeviceEngine] = []

    def make(*faults: Fault) -> FaultyDeviceEngine:
        made.append(engine := FaultyDeviceEngine(inner, faults, seed=1))
        engine.attach(fd, RANGES * SIZE)
        return engine

    yield make
    for engine in made:
        engine.release_hangs()
        engine.close(TIMEOUT_S)


def read_all(engine: DeviceEngine, fd: int) -> tuple[RangeResults, Bytes]:
    device = DeviceBytes(RANGES * SIZE)
    transfer = engine.submit(Op.READ, device.plan(fd, OFFSETS, SIZE))
    results = transfer.wait(TIMEOUT_S)
    assert transfer.done
    return results, device.get().reshape(RANGES, SIZE)


def rows(content: bytes | Bytes) -> Bytes:
    return np.frombuffer(content, np.uint8).reshape(RANGES, SIZE)


def differing_bits(a: Bytes, b: Bytes) -> list[int]:
    """Bits that differ, by row."""
    return np.unpackbits(a ^ b, axis=1).sum(axis=1).tolist()


def test_corrupt_flips_a_bit_on_the_device_and_reports_success(
    faulty: Faulty, fd: int, tmp_path: FilePath
) -> None:
    results, arrived = read_all(faulty(Fault(FaultKind.CORRUPT, match=Window(fd, 0, 3 * SIZE))), fd)
    assert results.moved.tolist() == [SIZE] * RANGES
    assert not results.errno.any()
    assert differing_bits(arrived, rows(CONTENT)) == [1] * 3 + [0] * (RANGES - 3)
    assert (tmp_path / "file").read_bytes() == CONTENT.tobytes()


def test_a_corrupt_write_leaves_the_callers_memory_alone_and_its_copies_are_freed(
    gpu: ModuleType, faulty: Faulty, fd: int, tmp_path: FilePath
) -> None:
    engine = faulty(Fault(FaultKind.CORRUPT, match=Window(fd, 0, 3 * SIZE)))
    device = DeviceBytes(RANGES * SIZE, new := random_bytes(RANGES * SIZE, 6))
    before = gpu.usage()
    ranges = device.plan(fd, OFFSETS, SIZE)
    transfer = engine.submit(Op.WRITE, ranges)
    assert transfer.wait(TIMEOUT_S).complete(ranges).all()
    assert np.array_equal(device.get(), new)
    file = rows((tmp_path / "file").read_bytes())
    assert differing_bits(file, rows(new)) == [1] * 3 + [0] * (RANGES - 3)
    assert engine.injected["corrupt"] == 3
    assert gpu.usage() == before


def test_memory_that_cannot_be_corrupted_has_the_inner_engines_result(faulty: Faulty, fd: int) -> None:
    engine = faulty(Fault(FaultKind.CORRUPT))
    host = memory(2 * BLOCK)
    ranges = DeviceBytes(3 * BLOCK).plan(fd, [0, BLOCK, 2 * BLOCK])
    ranges.address[:2] = 0, host.ctypes.data
    for op in Op:
        results = engine.submit(op, ranges).wait(TIMEOUT_S)
        assert results.errno.tolist() == [errno.EFAULT, errno.EFAULT, 0]
    assert not host.any()


def test_a_device_without_room_for_a_flipped_copy_writes_what_it_was_given(
    gpu: ModuleType, faulty: Faulty, fd: int, tmp_path: FilePath
) -> None:
    engine = faulty(Fault(FaultKind.CORRUPT))
    device = DeviceBytes(SIZE, new := random_bytes(SIZE, 7))
    gpu.cuda_faults("cuMemAlloc=cu:2")
    ranges = device.plan(fd, [0], SIZE)
    assert engine.submit(Op.WRITE, ranges).wait(TIMEOUT_S).complete(ranges).all()
    assert np.array_equal(rows((tmp_path / "file").read_bytes())[0], new)


def test_errors_short_and_misdirected_ranges_are_as_in_host_memory(faulty: Faulty, fd: int) -> None:
    engine = faulty(
        Fault(FaultKind.ERRNO, match=Window(fd, 0, SIZE), errno_code=errno.ENOSPC),
        Fault(FaultKind.SHORT, match=Window(fd, SIZE, 2 * SIZE)),
        Fault(FaultKind.MISDIRECT, match=Window(fd, 2 * SIZE, 3 * SIZE)),
    )
    results, arrived = read_all(engine, fd)
    assert results.errno.tolist() == [errno.ENOSPC, *[0] * (RANGES - 1)]
    assert results.moved.tolist() == [0, BLOCK, *[SIZE] * (RANGES - 2)]
    wanted = rows(CONTENT).copy()
    wanted[0], wanted[1, BLOCK:], wanted[2] = POISON, POISON, wanted[3]
    assert np.array_equal(arrived, wanted)


def test_a_hang_lasts_until_it_is_released(faulty: Faulty, fd: int) -> None:
    engine = faulty(Fault(FaultKind.HANG, match=Window(fd, 0, SIZE)))
    device = DeviceBytes(RANGES * SIZE)
    transfer = engine.submit(Op.READ, ranges := device.plan(fd, OFFSETS, SIZE))
    until(lambda: transfer.wait(0.01).complete(ranges)[1:].all())
    assert transfer.wait(0.0).errno.tolist() == [errno.ETIMEDOUT, *[0] * (RANGES - 1)]
    assert not transfer.done
    assert (device.get()[:SIZE] == POISON).all()
    engine.release_hangs()
    assert transfer.wait(TIMEOUT_S).complete(ranges).all()
    assert np.array_equal(device.get(), CONTENT)


def test_it_is_the_inner_engine_in_all_else(faulty: Faulty, inner: DeviceEngine, fd: int) -> None:
    engine = faulty()
    assert isinstance(engine, DeviceEngine)
    assert (engine.name, engine.device, engine.path) == (f"faulty-{inner.name}", 0, inner.path)
    with DeviceArena(1 << 20, registrars=[engine]) as arena:
        with pytest.raises(ArgumentError):
            inner.register(arena.address, BLOCK)
        ranges = DeviceBytes(BLOCK).plan(fd, [0])
        ranges.address[0] = arena.address
        assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
    assert engine.moved.bytes_by() == {(Op.READ, inner.path): BLOCK}
    assert inner.path in (Path.DIRECT, Path.BOUNCE)
    inner.moved_again = 7
    assert engine.moved_again == 7


def test_closing_it_closes_the_inner_engine_unless_something_hangs_in_its_memory(
    gpu: ModuleType, faulty: Faulty, inner: DeviceEngine, fd: int
) -> None:
    engine = faulty(Fault(FaultKind.HANG, op=Op.WRITE, limit=1), Fault(FaultKind.CORRUPT))
    device = DeviceBytes(2 * SIZE)
    before = gpu.usage()
    transfer = engine.submit(Op.WRITE, ranges := device.plan(fd, OFFSETS[:2], SIZE))
    until(lambda: sum(inner.moved.bytes_by().values()) == SIZE)  # what has not begun by the end never does
    engine.close(0.05)
    assert not transfer.done
    assert gpu.usage() > before, "a flipped copy, until its transfer is over"
    with pytest.raises(EngineError):
        inner.submit(Op.WRITE, ranges)
    engine.release_hangs()
    assert transfer.wait(TIMEOUT_S).errno.tolist() == [errno.EIO, 0]
    assert gpu.usage() == before


def test_a_device_that_cannot_be_used_is_an_error(gpu: ModuleType, inner: DeviceEngine) -> None:
    inner.device = 7
    with pytest.raises(DeviceError, match="no such device"):
        FaultyDeviceEngine(inner, (), seed=0)
    inner.close(TIMEOUT_S)

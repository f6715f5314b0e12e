"""The bounce engine on the simulated GPU: what is moved, by which copies, and what errors become."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType

import numpy as np
import pytest

from gdsstore.engines.base import Op
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.paths import Path
from gdsstore.errors import ArgumentError, EngineError
from gdsstore.memory.device_arena import DeviceArena
from tests.engines.bounce_rig import ARENA_BLOCKS, GROUP_BLOCKS, POISON, DeviceBytes, blocks, small
from tests.engines.rig import BLOCK, TIMEOUT_S, Bytes, is_direct, memory, open_file, random_bytes

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE)
LARGE_BLOCKS = 3 * ARENA_BLOCKS


@pytest.fixture
def engine(gpu: ModuleType) -> Iterator[BounceEngine]:
    with small() as engine:
        yield engine


@pytest.fixture
def large(engine: BounceEngine, tmp_path: FilePath) -> Iterator[int]:
    """A file of LARGE_BLOCKS blocks and 100 bytes."""
    nbytes = LARGE_BLOCKS * BLOCK + 100
    fd = open_file(tmp_path / "large", nbytes, content=random_bytes(nbytes, 11))
    engine.attach(fd, nbytes)
    yield fd
    engine.detach(fd)
    os.close(fd)


def large_content() -> Bytes:
    return random_bytes(LARGE_BLOCKS * BLOCK + 100, 11)


def copies(gpu: ModuleType) -> int:
    return int(gpu.cuda_calls("cuMemcpyAsync"))


def test_bytes_go_through_pinned_memory_and_are_counted_as_bounced(
    gpu: ModuleType, engine: BounceEngine, fd: int, content: Bytes
) -> None:
    assert engine.path is Path.BOUNCE
    assert engine.grant.pinned
    device = DeviceBytes(len(content))
    assert engine.submit(Op.READ, device.plan(fd, blocks(16))).wait(TIMEOUT_S).moved.sum() == 16 * BLOCK
    assert np.array_equal(device.get(), content)
    engine.submit(Op.WRITE, device.plan(fd, blocks(3))).wait(TIMEOUT_S)
    assert engine.moved.bytes_by() == {(Op.READ, Path.BOUNCE): 16 * BLOCK, (Op.WRITE, Path.BOUNCE): 3 * BLOCK}
    assert engine.moved.take(fd) == engine.moved.bytes_by()


def test_memory_that_cannot_be_pinned_is_reported_and_moves_all_the_same(
    gpu: ModuleType, tmp_path: FilePath, content: Bytes, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.cuda_faults("cuMemHostRegister=cu:2")
    with small() as engine:
        assert not engine.grant.pinned
        assert "cuMemHostRegister gave CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
        fd = open_file(tmp_path / "file", len(content), content=content)
        engine.attach(fd, len(content))
        device = DeviceBytes(len(content))
        ranges = device.plan(fd, blocks(16))
        assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
        assert np.array_equal(device.get(), content)
        os.close(fd)


def test_what_is_contiguous_on_the_device_is_one_copy_a_group(
    gpu: ModuleType, engine: BounceEngine, fd: int
) -> None:
    device, before = DeviceBytes(64 * BLOCK), copies(gpu)
    engine.submit(Op.READ, device.plan(fd, blocks(16))).wait(TIMEOUT_S)
    assert copies(gpu) - before == 16 // GROUP_BLOCKS
    engine.submit(Op.READ, device.plan(fd, blocks(4), stride=2 * BLOCK)).wait(TIMEOUT_S)
    assert copies(gpu) - before == 16 // GROUP_BLOCKS + 4


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(
    ("file_offset", "length", "skew"), [(1, BLOCK, 0), (0, BLOCK - 1, 0), (0, BLOCK, 8), (511, 9234, 77)]
)
def test_what_is_not_aligned_moves_and_its_neighbours_are_left_alone(
    engine: BounceEngine,
    fd: int,
    tmp_path: FilePath,
    content: Bytes,
    op: Op,
    file_offset: int,
    length: int,
    skew: int,
) -> None:
    there = random_bytes(8 * BLOCK, 3)
    device = DeviceBytes(len(there), there)
    ranges = device.plan(fd, [4 * BLOCK, file_offset, 5 * BLOCK])  # with others, which are aligned
    ranges.address[:] = np.array([6 * BLOCK, skew, 7 * BLOCK], np.uint64) + np.uint64(device.address)
    ranges.length[1] = length
    assert is_direct(fd)
    assert engine.submit(op, ranges).wait(TIMEOUT_S).complete(ranges).all()
    file = np.frombuffer((tmp_path / "file").read_bytes(), np.uint8)
    wanted, source = (there, content) if op is Op.READ else (content.copy(), there)
    for offset, at, count in ((4, 6, BLOCK), (5, 7, BLOCK)):
        to, start = (at, offset) if op is Op.READ else (offset, at)
        wanted[to * BLOCK : to * BLOCK + count] = source[start * BLOCK : start * BLOCK + count]
    to, start = (skew, file_offset) if op is Op.READ else (file_offset, skew)
    wanted[to : to + length] = source[start : start + length]
    assert np.array_equal(device.get() if op is Op.READ else file, wanted)


def test_ranges_that_are_not_aligned_leave_no_descriptor_open_and_need_an_attached_file(
    engine: BounceEngine, fd: int, tmp_path: FilePath
) -> None:
    device = DeviceBytes(BLOCK)
    before = len(os.listdir("/proc/self/fd"))
    engine.submit(Op.READ, device.plan(fd, [1])).wait(TIMEOUT_S)
    assert len(os.listdir("/proc/self/fd")) == before
    unattached = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    closed = os.dup(unattached)
    engine.attach(closed, 16 * BLOCK)
    os.close(closed)
    for other in (unattached, closed):
        for op in Op:
            results = engine.submit(op, device.plan(other, [1])).wait(TIMEOUT_S)
            assert (results.errno.tolist(), results.moved.tolist()) == ([errno.EBADF], [0])
    os.close(unattached)


def test_ranges_larger_than_the_arena_move_whole(
    engine: BounceEngine, large: int, tmp_path: FilePath
) -> None:
    nbytes = LARGE_BLOCKS * BLOCK
    device = DeviceBytes(nbytes)
    ranges = device.plan(large, [0], nbytes)
    assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
    assert np.array_equal(device.get(), large_content()[:nbytes])
    device.put(written := random_bytes(nbytes, 12))
    assert engine.submit(Op.WRITE, ranges).wait(TIMEOUT_S).complete(ranges).all()
    assert (tmp_path / "large").read_bytes() == written.tobytes() + large_content()[nbytes:].tobytes()
    assert engine._arena.stats().peak_bytes <= ARENA_BLOCKS * BLOCK


def test_a_short_read_copies_only_what_moved(engine: BounceEngine, large: int) -> None:
    length = 2 * GROUP_BLOCKS * BLOCK
    device = DeviceBytes(3 * length)
    start = (LARGE_BLOCKS - 3) * BLOCK
    results = engine.submit(Op.READ, device.plan(large, [0, start, start + length], length)).wait(TIMEOUT_S)
    assert results.errno.tolist() == [0, 0, 0]
    assert results.moved.tolist() == [length, 3 * BLOCK + 100, 0]
    arrived = device.get()[length : 2 * length]
    assert np.array_equal(arrived[: 3 * BLOCK + 100], large_content()[start:])
    assert (arrived[3 * BLOCK + 100 :] == POISON).all()


# ---- addresses ----


def test_addresses_that_are_not_the_devices_are_efault_and_nothing_is_touched(
    engine: BounceEngine, fd: int, tmp_path: FilePath, content: Bytes
) -> None:
    host = memory(BLOCK)
    device = DeviceBytes(6 * BLOCK)
    ranges = device.plan(fd, blocks(6))
    ranges.address[1:5] = [0, 12345 * BLOCK, host.ctypes.data, (1 << 64) - BLOCK]
    for op in Op:
        results = engine.submit(op, ranges).wait(TIMEOUT_S)
        assert results.errno.tolist() == [0, *[errno.EFAULT] * 4, 0]
        assert results.moved.tolist() == [BLOCK, 0, 0, 0, 0, BLOCK]
    assert not host.any()
    assert (tmp_path / "file").read_bytes() == content.tobytes()


def test_a_range_over_the_end_of_an_allocation_is_efault(engine: BounceEngine, fd: int) -> None:
    device = DeviceBytes(4 * BLOCK)
    start, size = device.cuda.allocation_of(device.address)
    ranges = device.plan(fd, blocks(3))
    ranges.address[:] = start + size - BLOCK, start + size - BLOCK // 2, start
    results = engine.submit(Op.READ, ranges).wait(TIMEOUT_S)
    assert results.errno.tolist() == [0, errno.EFAULT, 0]


def test_the_driver_is_asked_once_an_allocation_and_not_for_registered_memory(
    gpu: ModuleType, engine: BounceEngine, fd: int
) -> None:
    device = DeviceBytes(16 * BLOCK)
    before = gpu.cuda_calls("cuMemGetAddressRange")
    engine.submit(Op.READ, device.plan(fd, blocks(GROUP_BLOCKS))).wait(TIMEOUT_S)
    assert gpu.cuda_calls("cuMemGetAddressRange") - before == 1
    engine.register(device.address, device.nbytes)
    engine.submit(Op.READ, device.plan(fd, blocks(GROUP_BLOCKS))).wait(TIMEOUT_S)
    assert gpu.cuda_calls("cuMemGetAddressRange") - before == 1
    engine.deregister(device.address)


def test_neighbouring_allocations_are_copied_one_by_one(
    engine: BounceEngine, fd: int, content: Bytes
) -> None:
    parts = sorted((DeviceBytes(2 << 20) for _ in range(2)), key=lambda part: part.address)
    if parts[0].address + parts[0].nbytes != parts[1].address:
        pytest.skip("the driver put them apart")
    ranges = parts[0].plan(fd, blocks(2))
    ranges.address[:] = parts[1].address - BLOCK, parts[1].address
    assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
    assert np.array_equal(parts[0].get()[-BLOCK:], content[:BLOCK])
    assert np.array_equal(parts[1].get()[:BLOCK], content[BLOCK : 2 * BLOCK])


def test_only_the_devices_memory_can_be_registered_and_only_once(engine: BounceEngine) -> None:
    host = memory(BLOCK)
    with pytest.raises(EngineError, match="not memory of this device"):
        engine.register(host.ctypes.data, BLOCK)
    with DeviceArena(1 << 20, registrars=[engine]) as arena:
        with pytest.raises(ArgumentError):
            engine.register(arena.address, BLOCK)
        assert engine.registered.addresses == [arena.address]
    assert engine.registered.addresses == []


# ---- CUDA errors ----


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery", "cuEventCreate"])
def test_copies_that_fail_are_errors_and_never_success(
    gpu: ModuleType, engine: BounceEngine, fd: int, tmp_path: FilePath, content: Bytes, op: Op, call: str
) -> None:
    device = DeviceBytes(16 * BLOCK, random_bytes(16 * BLOCK, 4))
    gpu.cuda_faults(f"{call}@1+1=cu:700")
    transfer = engine.submit(op, device.plan(fd, blocks(16)))
    results = transfer.wait(TIMEOUT_S)
    gpu.cuda_faults("")
    assert transfer.done
    assert results.errno.tolist() == [errno.EFAULT] * 16
    assert not results.moved.any()
    assert engine.moved.bytes_by() == {}
    assert (tmp_path / "file").read_bytes() == content.tobytes()
    ranges = device.plan(fd, blocks(16))
    assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all(), "the arena is whole"


def test_a_copy_that_fails_hits_its_range_and_no_other(
    gpu: ModuleType, engine: BounceEngine, fd: int, content: Bytes
) -> None:
    device = DeviceBytes(16 * BLOCK)
    gpu.cuda_faults("cuMemcpyAsync@2=cu:1")
    ranges = device.plan(fd, blocks(4), stride=2 * BLOCK)
    results = engine.submit(Op.READ, ranges).wait(TIMEOUT_S)
    assert results.errno.tolist() == [0, errno.EFAULT, 0, 0]
    assert results.moved.tolist() == [BLOCK, 0, BLOCK, BLOCK]
    arrived = device.get().reshape(16, BLOCK)
    assert np.array_equal(arrived[[0, 4, 6]].ravel(), content.reshape(16, BLOCK)[[0, 2, 3]].ravel())
    assert (arrived[2] == POISON).all()


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_a_single_error_is_got_over_and_the_bytes_are_right(
    gpu: ModuleType, engine: BounceEngine, fd: int, content: Bytes, call: str
) -> None:
    device = DeviceBytes(16 * BLOCK)
    gpu.cuda_faults(f"{call}=cu:900")
    ranges = device.plan(fd, blocks(16))
    assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
    assert np.array_equal(device.get(), content)

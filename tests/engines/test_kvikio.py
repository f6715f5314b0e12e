"""The kvikio engine on the simulated GPU: errors and their errno, hangs, paths, and what it leaves behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gdsstore.engines.base import Op
from gdsstore.engines.detour import CHUNK_BYTES
from gdsstore.engines.kvikio import MAX_COMPAT_WORKERS, KvikioEngine
from gdsstore.engines.paths import Path
from gdsstore.errors import ArgumentError, ConfigError, EngineError
from gdsstore.memory.device_arena import DeviceArena
from tests.cudasim.fixtures import need
from tests.engines.bounce_rig import until
from tests.engines.on_device import OnDevice
from tests.engines.rig import BLOCK, TIMEOUT_S, Bytes, memory, move, open_file, plan, random_bytes, run

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE)


@pytest.fixture
def engine(gpu: ModuleType) -> Iterator[OnDevice]:
    need("kvikio")
    with OnDevice(KvikioEngine(4)) as engine:
        yield engine


def inner(engine: OnDevice) -> KvikioEngine:
    assert isinstance(engine.inner, KvikioEngine)
    return engine.inner


def four(fd: int, buffer: Bytes) -> Any:
    return plan(fd, [i * BLOCK for i in range(4)], buffer, BLOCK)


def test_aligned_ranges_in_registered_memory_are_direct(gpu: ModuleType, engine: OnDevice, fd: int) -> None:
    assert inner(engine).path is Path.DIRECT
    assert inner(engine).cufile is not None
    move(engine, Op.READ, four(fd, memory(4 * BLOCK)))
    move(engine, Op.WRITE, plan(fd, [0], random_bytes(2 * BLOCK), 2 * BLOCK))
    assert inner(engine).moved.bytes_by() == {
        (Op.READ, Path.DIRECT): 4 * BLOCK,
        (Op.WRITE, Path.DIRECT): 2 * BLOCK,
    }
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (6 * BLOCK, 0)


@pytest.mark.parametrize(
    ("file_offset", "length", "skew"), [(1, BLOCK, 0), (0, BLOCK - 1, 0), (0, BLOCK, 8), (511, 1234, 77)]
)
def test_what_is_not_aligned_is_right_and_counted_as_not_direct(
    gpu: ModuleType, engine: OnDevice, fd: int, content: Bytes, file_offset: int, length: int, skew: int
) -> None:
    buffer = memory(3 * BLOCK)
    move(engine, Op.READ, plan(fd, [file_offset], buffer[skew:], length))
    assert np.array_equal(buffer[skew : skew + length], content[file_offset : file_offset + length])
    assert not buffer[:skew].any()
    assert not buffer[skew + length :].any()
    assert inner(engine).moved.bytes_by() == {(Op.READ, Path.COMPAT): length}
    assert gpu.stats().direct_bytes == 0


def test_memory_that_was_not_registered_is_counted_as_not_direct(
    gpu: ModuleType, engine: OnDevice, fd: int, content: Bytes
) -> None:
    with DeviceArena(4 * BLOCK) as arena, arena.lease(BLOCK, 0) as lease:
        ranges = plan(fd, [BLOCK], memory(BLOCK), BLOCK)
        ranges.address[0] = lease.address
        assert inner(engine).submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
        back = memory(BLOCK)
        engine.cuda.copy(back.ctypes.data, lease.address, BLOCK)
        assert np.array_equal(back, content[BLOCK : 2 * BLOCK])
    assert inner(engine).moved.bytes_by() == {(Op.READ, Path.COMPAT): BLOCK}
    assert gpu.stats().direct_bytes == 0


def test_every_byte_that_is_called_direct_was_direct_to_cufile(
    gpu: ModuleType, engine: OnDevice, fd: int
) -> None:
    random = np.random.default_rng(5)
    for _ in range(40):
        offset, length = (
            int(random.choice([0, 1, BLOCK, 3 * BLOCK])),
            int(random.choice([BLOCK, 2 * BLOCK, 100])),
        )
        skew = int(random.choice([0, 0, 512]))
        move(engine, Op.READ, plan(fd, [offset], memory(4 * BLOCK)[skew:], length))
    moved = inner(engine).moved.bytes_by()
    assert moved[Op.READ, Path.DIRECT] == gpu.stats().direct_bytes
    assert moved[Op.READ, Path.COMPAT] == gpu.stats().fallback_bytes


def test_kvikios_compat_mode_is_reported_and_goes_past_cufile(
    gpu: ModuleType, tmp_path: FilePath, content: Bytes
) -> None:
    need("kvikio")
    before = gpu.cufile_calls("cuFileRead")
    with OnDevice(KvikioEngine(64, compat=True)) as engine:
        assert inner(engine).path is Path.COMPAT
        assert inner(engine).compat
        fd = open_file(tmp_path / "file", len(content), content=content)
        engine.attach(fd, len(content))
        buffer = memory(4 * BLOCK)
        move(engine, Op.READ, four(fd, buffer))
        assert np.array_equal(buffer, content[: 4 * BLOCK])
        assert inner(engine).moved.bytes_by() == {(Op.READ, Path.COMPAT): 4 * BLOCK}
        assert len(inner(engine)._threads) == MAX_COMPAT_WORKERS
        os.close(fd)
    assert gpu.cufile_calls("cuFileRead") == before


PRINT_PATH = """
from tests.cudasim import simgpu
simgpu.load()
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.errors import EngineError
try:
    with KvikioEngine(64) as engine:
        print(engine.path, engine.cufile)
except EngineError as error:
    print(error)
    KvikioEngine(64, compat=True).close(1)
"""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "direct CufileState(routes=('nvfs',), may_fall_back=False, nvidia_fs='2.26')"),
        (
            {"CUFILESIM_COMPAT": "1"},
            "direct CufileState(routes=('nvfs',), may_fall_back=True",
        ),
        (
            {"CUFILESIM_NVFS": "0", "CUFILESIM_COMPAT": "1"},
            "compat CufileState(routes=(), may_fall_back=True",
        ),
        ({"CUFILESIM_NVFS": "0"}, "cuFile does not start here"),
        ({"CUDASIM_NO_DEVICE": "1"}, "CUDA_ERROR_NO_DEVICE"),
    ],
    ids=["direct", "may fall back", "cuFile in compat mode", "no cuFile", "no device"],
)
def test_what_cufile_is_able_to_is_reported(gpu: ModuleType, environment: dict[str, str], said: str) -> None:
    need("kvikio")
    ended = run(PRINT_PATH, **environment)
    assert said in ended.stdout + ended.stderr


def test_others_in_the_process_keep_their_compat_mode(engine: OnDevice, fd: int) -> None:
    import kvikio.defaults

    before = kvikio.defaults.get("compat_mode")
    move(engine, Op.READ, four(fd, memory(4 * BLOCK)))
    assert kvikio.defaults.get("compat_mode") is before


# ---- errors ----


@pytest.mark.parametrize("fault", ["errno:5", "op:5030", "op:5036", "cu:2"])
def test_a_read_that_failed_on_the_direct_path_is_moved_by_the_detour(
    gpu: ModuleType, engine: OnDevice, fd: int, content: Bytes, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.cufile_faults(f"cuFileRead@2={fault}")
    buffer = memory(4 * BLOCK)
    move(engine, Op.READ, four(fd, buffer))
    assert np.array_equal(buffer, content[: 4 * BLOCK])
    moved = inner(engine).moved.bytes_by()
    if fault != "cu:2":  # which is nothing that a read can do
        assert inner(engine).moved_again == 1
        assert moved == {(Op.READ, Path.DIRECT): 3 * BLOCK, (Op.READ, Path.BOUNCE): BLOCK}
        assert "said once" in caplog.text


def test_the_detour_moves_ranges_of_any_length(gpu: ModuleType, engine: OnDevice, tmp_path: FilePath) -> None:
    content = random_bytes(3 * CHUNK_BYTES, 9)
    fd = open_file(tmp_path / "large", len(content), content=content)
    engine.attach(fd, len(content))
    buffer, length = memory(len(content)), 2 * CHUNK_BYTES + 3 * BLOCK
    gpu.cufile_faults("cuFileRead@1+1=errno:5")
    move(engine, Op.READ, plan(fd, [BLOCK], buffer, length))
    assert np.array_equal(buffer[:length], content[BLOCK : BLOCK + length])
    assert not buffer[length:].any()
    results = engine.submit(Op.READ, plan(fd, [2 * CHUNK_BYTES], buffer, 2 * CHUNK_BYTES)).wait(TIMEOUT_S)
    assert (results.moved.tolist(), results.errno.tolist()) == ([CHUNK_BYTES], [0])
    assert inner(engine).moved.bytes_by() == {(Op.READ, Path.BOUNCE): length + CHUNK_BYTES}
    engine.detach(fd)
    os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EPERM, errno.EROFS, errno.EDQUOT])
def test_a_failed_write_has_its_errno_and_hits_no_other_range(
    gpu: ModuleType, engine: OnDevice, fd: int, tmp_path: FilePath, content: Bytes, code: int
) -> None:
    gpu.cufile_faults(f"cuFileWrite@2=errno:{code}")
    written = random_bytes(4 * BLOCK, 8)
    results = engine.submit(Op.WRITE, ranges := four(fd, written)).wait(TIMEOUT_S)
    assert sorted(results.errno.tolist()) == [0, 0, 0, code]
    failed = int(np.flatnonzero(results.errno)[0])
    assert results.moved[failed] == 0
    assert results.complete(ranges).sum() == 3
    after = np.frombuffer((tmp_path / "file").read_bytes(), np.uint8).reshape(-1, BLOCK)
    assert np.array_equal(after[failed], content.reshape(-1, BLOCK)[failed])
    others = [i for i in range(4) if i != failed]
    assert np.array_equal(after[others], written.reshape(-1, BLOCK)[others])


def test_errors_of_the_drive_come_out_of_the_detour_with_their_errno(
    engine: OnDevice, tmp_path: FilePath
) -> None:
    import resource

    fd = open_file(tmp_path / "small", BLOCK)
    engine.attach(fd, 8 * BLOCK)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, before[1]))
    try:
        results = engine.submit(Op.WRITE, plan(fd, [0, 4 * BLOCK], random_bytes(2 * BLOCK), BLOCK)).wait(
            TIMEOUT_S
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert results.errno.tolist() == [0, errno.EFBIG]
    assert results.moved.tolist() == [BLOCK, 0]
    engine.detach(fd)
    os.close(fd)


@pytest.mark.parametrize("op", list(Op))
def test_a_short_transfer_is_short_and_no_error(gpu: ModuleType, engine: OnDevice, fd: int, op: Op) -> None:
    gpu.cufile_faults(f"cuFile{op.name.title()}=short:512")
    buffer = random_bytes(2 * BLOCK, 3)
    results = engine.submit(op, plan(fd, [0, BLOCK], buffer, BLOCK)).wait(TIMEOUT_S)
    assert sorted(results.moved.tolist()) == [512, BLOCK]
    assert results.errno.tolist() == [0, 0]


def test_addresses_that_are_not_the_devices_are_efault_and_nothing_is_touched(
    engine: OnDevice, fd: int
) -> None:
    host = memory(BLOCK)
    foreign = [0, 12345 * BLOCK, host.ctypes.data, (1 << 64) - BLOCK]
    ranges = plan(fd, [0] * len(foreign), memory(len(foreign) * BLOCK), BLOCK)
    ranges.address[:] = foreign
    for op in Op:
        results = inner(engine).submit(op, ranges).wait(TIMEOUT_S)
        assert results.errno.tolist() == [errno.EFAULT] * len(foreign)
    assert not host.any()
    move(engine, Op.READ, four(fd, memory(4 * BLOCK)))  # CUDA's context is as good as before


def test_a_range_over_the_end_of_an_allocation_is_efault(engine: OnDevice, fd: int) -> None:
    with DeviceArena(1 << 20, registrars=[engine.inner]) as arena:
        start, size = engine.cuda.allocation_of(arena.address)
        ranges = plan(fd, [0, 0], memory(2 * BLOCK), BLOCK)
        ranges.address[:] = start + size - BLOCK, start + size - BLOCK // 2
        results = inner(engine).submit(Op.READ, ranges).wait(TIMEOUT_S)
        assert results.errno.tolist() == [0, errno.EFAULT]


def test_a_file_that_cufile_refuses_is_an_error_and_not_attached(
    gpu: ModuleType, engine: OnDevice, tmp_path: FilePath
) -> None:
    fd = open_file(tmp_path / "refused", BLOCK)
    gpu.cufile_faults("cuFileHandleRegister=op:5008")
    with pytest.raises(EngineError, match="not supported on current file"):
        engine.attach(fd, BLOCK)
    engine.attach(fd, BLOCK)
    move(engine, Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))
    engine.detach(fd)
    os.close(fd)


# ---- registration ----


def test_memory_is_registered_with_cufile_until_it_is_deregistered(gpu: ModuleType, engine: OnDevice) -> None:
    before = gpu.stats().buffer_bytes
    with DeviceArena(1 << 20, registrars=[engine.inner]) as arena:
        # Whole allocations, whatever part one names: offsets must count from where they begin.
        assert gpu.stats().buffer_bytes == before + engine.cuda.allocation_of(arena.address)[1]
        ours = inner(engine).registered.find(np.array([arena.address], np.uint64), np.array([1], np.int64))
        assert ours[1].tolist() == [engine.cuda.allocation_of(arena.address)[0]]
    assert gpu.stats().buffer_bytes == before
    engine.inner.deregister(4096)


def test_refused_and_overlapping_registrations_are_typed_errors_and_leave_nothing(
    gpu: ModuleType, engine: OnDevice
) -> None:
    before = gpu.usage(), gpu.stats().buffers
    gpu.cufile_faults("cuFileBufRegister=op:5036")
    with pytest.raises(EngineError, match="pinned GPU Memory"):
        DeviceArena(1 << 20, registrars=[engine.inner])
    assert (gpu.usage(), gpu.stats().buffers) == before
    with DeviceArena(1 << 20, registrars=[engine.inner]) as arena:
        for address, nbytes in ((arena.address, BLOCK), (arena.address, 1 << 30), (0, 1), (4096, BLOCK)):
            with pytest.raises(ArgumentError):
                engine.inner.register(address, nbytes)


def test_a_closed_engine_has_deregistered_everything(gpu: ModuleType, tmp_path: FilePath) -> None:
    need("kvikio")
    before = gpu.stats().buffers, gpu.stats().handles
    engine = KvikioEngine(2)
    arena = DeviceArena(1 << 20, registrars=[engine])
    fd = open_file(tmp_path / "file", BLOCK)
    engine.attach(fd, BLOCK)
    engine.close(TIMEOUT_S)
    assert (gpu.stats().buffers, gpu.stats().handles) == before
    assert arena.close(0)
    os.close(fd)


# ---- time ----


def test_a_wait_ends_by_its_deadline_while_a_call_hangs_and_others_go_on(
    gpu: ModuleType, engine: OnDevice, fd: int, content: Bytes
) -> None:
    gpu.cufile_faults("cuFileRead=delay:4000000")
    before = gpu.cufile_calls("cuFileRead")
    late, good = memory(BLOCK), memory(4 * BLOCK)
    hanging = engine.submit(Op.READ, plan(fd, [0], late, BLOCK))
    until(lambda: gpu.cufile_calls("cuFileRead") > before)
    assert hanging.wait(0.05).errno.tolist() == [errno.ETIMEDOUT]
    assert not hanging.done
    move(engine, Op.READ, four(fd, good))
    assert np.array_equal(good, content[: 4 * BLOCK])
    assert not hanging.done
    assert hanging.wait(TIMEOUT_S).moved.tolist() == [BLOCK]
    assert hanging.done
    assert np.array_equal(late, content[:BLOCK])


def test_no_more_calls_are_in_flight_than_there_are_workers(
    gpu: ModuleType, engine: OnDevice, fd: int
) -> None:
    gpu.cufile_faults("cuFileRead@1+1=delay:3000000")
    before = gpu.cufile_calls("cuFileRead")
    transfer = engine.submit(Op.READ, plan(fd, [0] * 12, memory(12 * BLOCK), BLOCK))
    until(lambda: gpu.cufile_calls("cuFileRead") - before >= 4)
    threading.Event().wait(0.1)
    assert gpu.cufile_calls("cuFileRead") - before == 4
    results = transfer.wait(0.0)  # what nobody has begun is not begun any more
    assert results.errno.tolist() == [errno.ETIMEDOUT] * 12
    results = transfer.wait(TIMEOUT_S)
    assert sorted(results.moved.tolist()) == [0] * 8 + [BLOCK] * 4
    assert gpu.cufile_calls("cuFileRead") - before == 4


@pytest.mark.parametrize("workers", [0, 129])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError):
        KvikioEngine(workers)


def test_a_hanging_call_keeps_neither_close_nor_the_process_and_its_memory_stays(
    gpu: ModuleType, tmp_path: FilePath
) -> None:
    need("kvikio")
    ended = run(f"""
import logging
logging.basicConfig(format="%(message)s")
from pathlib import Path
from tests.cudasim import simgpu
simgpu.load()
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.memory.device_arena import DeviceArena
from tests.engines.rig import *
engine = KvikioEngine(1)
arena = DeviceArena(1 << 20, registrars=[engine])
fd = open_file(Path({str(tmp_path / "file")!r}), BLOCK)
engine.attach(fd, BLOCK)
simgpu.cufile_faults("cuFileRead=delay:30000000")
ranges = plan(fd, [0], memory(BLOCK), BLOCK)
ranges.address[0] = arena.address
transfer = engine.submit(Op.READ, ranges)
engine.close(0.2)
print(transfer.done, arena.close(0), simgpu.usage()[0])
os._exit(0)
""")
    assert ended.stdout == "False False 1\n", ended.stderr
    assert "1 calls had not ended" in ended.stderr
    assert "a call that hangs may still use the memory" in ended.stderr


def test_a_missing_package_names_the_pip_line(gpu: ModuleType) -> None:
    ended = run("""
import sys
from tests.cudasim import simgpu
simgpu.load()
sys.modules["kvikio"] = None  # how Python marks what cannot be imported
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.errors import MissingExtraError
try:
    KvikioEngine(4)
except MissingExtraError as error:
    print(error)
""")
    assert 'pip install "gdsstore[cuda13]"' in ended.stdout, ended.stderr

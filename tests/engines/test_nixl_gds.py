"""NIXL's GDS plugins on the simulated GPU: losses come to light with GDS_MT, and are why GDS is refused unless checked."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType

import numpy as np
import pytest

from gdsstore.engines.base import Op
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.engines.paths import Path
from gdsstore.errors import ArgumentError, ConfigError, DeviceError, EngineError
from gdsstore.memory.device_arena import DeviceArena
from tests.cudasim.fixtures import need
from tests.engines.bounce_rig import until
from tests.engines.on_device import OnDevice
from tests.engines.rig import BLOCK, TIMEOUT_S, Bytes, memory, move, open_file, plan, random_bytes, run

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE, NIXL_LOG_LEVEL="FATAL")

CUFILE_CALL = {Op.READ: "cuFileRead", Op.WRITE: "cuFileWrite"}


@pytest.fixture
def engine(gpu: ModuleType) -> Iterator[OnDevice]:
    need("nixl", "nixl_cu13")
    with OnDevice(NixlGdsEngine(128, threads=4)) as engine:
        yield engine


def test_bytes_are_counted_by_the_path_that_they_took(
    gpu: ModuleType, engine: OnDevice, fd: int, content: Bytes
) -> None:
    assert engine.inner.path is Path.DIRECT
    move(engine, Op.READ, plan(fd, [0, 2 * BLOCK], memory(2 * BLOCK), BLOCK))
    move(engine, Op.READ, plan(fd, [5], buffer := memory(BLOCK), BLOCK))
    assert np.array_equal(buffer, content[5 : 5 + BLOCK])
    assert engine.inner.moved.bytes_by() == {(Op.READ, Path.DIRECT): 2 * BLOCK, (Op.READ, Path.COMPAT): BLOCK}
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (2 * BLOCK, BLOCK)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("fault", ["errno:5", "op:5030", "short:512"])
def test_a_loss_below_nixl_is_noticed_and_made_good(
    gpu: ModuleType, engine: OnDevice, fd: int, tmp_path: FilePath, content: Bytes, op: Op, fault: str
) -> None:
    gpu.cufile_faults(f"{CUFILE_CALL[op]}@3={fault}")
    buffer = random_bytes(8 * BLOCK, 3)
    move(engine, op, plan(fd, [i * BLOCK for i in range(8)], buffer, BLOCK))
    after = np.frombuffer((tmp_path / "file").read_bytes(), np.uint8)[: 8 * BLOCK]
    assert np.array_equal(after, buffer)
    if op is Op.READ:
        assert np.array_equal(buffer, content[: 8 * BLOCK])
    assert engine.inner.moved_again == 8
    assert engine.inner.moved.bytes_by() == {(op, Path.BOUNCE): 8 * BLOCK}


def test_errors_of_the_drive_are_blamed_on_their_range(engine: OnDevice, tmp_path: FilePath) -> None:
    fd = open_file(tmp_path / "small", BLOCK)
    engine.attach(fd, 8 * BLOCK)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, before[1]))
    try:
        ranges = plan(fd, [0, 4 * BLOCK, BLOCK], random_bytes(3 * BLOCK), BLOCK)
        results = engine.submit(Op.WRITE, ranges).wait(TIMEOUT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert results.errno.tolist() == [0, errno.EFBIG, 0]
    assert results.moved.tolist() == [BLOCK, 0, BLOCK]
    engine.detach(fd)
    os.close(fd)


def test_memory_that_was_not_registered_does_not_take_its_neighbours_off_cufile(
    gpu: ModuleType, engine: OnDevice, fd: int, content: Bytes
) -> None:
    with (
        DeviceArena(1 << 20, registrars=[engine.inner]) as known,
        DeviceArena(1 << 20) as unknown,
    ):
        ranges = plan(fd, [0, BLOCK, 2 * BLOCK, 3 * BLOCK], memory(4 * BLOCK), BLOCK)
        ranges.address[:] = known.address, unknown.address, 12345 * BLOCK, known.address + BLOCK
        results = engine.inner.submit(Op.READ, ranges).wait(TIMEOUT_S)
        assert results.errno.tolist() == [0, 0, errno.EFAULT, 0]
        back = memory(BLOCK)
        engine.cuda.copy(back.ctypes.data, unknown.address, BLOCK)
        assert np.array_equal(back, content[BLOCK : 2 * BLOCK])
        moved = engine.inner.moved.bytes_by()
        assert moved == {(Op.READ, Path.DIRECT): 2 * BLOCK, (Op.READ, Path.BOUNCE): BLOCK}
    assert engine.inner.moved_again == 0


def test_a_wait_ends_by_its_deadline_while_cufile_hangs_and_others_go_on(
    gpu: ModuleType, engine: OnDevice, fd: int, content: Bytes
) -> None:
    gpu.cufile_faults("cuFileRead=delay:4000000")
    before = gpu.cufile_calls("cuFileRead")
    late, good = memory(BLOCK), memory(BLOCK)
    hanging = engine.submit(Op.READ, plan(fd, [0], late, BLOCK))
    until(lambda: gpu.cufile_calls("cuFileRead") > before)
    assert hanging.wait(0.05).errno.tolist() == [errno.ETIMEDOUT]
    assert not hanging.done
    move(engine, Op.READ, plan(fd, [BLOCK], good, BLOCK))
    assert np.array_equal(good, content[BLOCK : 2 * BLOCK])
    assert not hanging.done
    assert hanging.wait(TIMEOUT_S).moved.tolist() == [BLOCK]
    assert np.array_equal(late, content[:BLOCK])


def test_memory_is_registered_until_it_is_deregistered_or_the_engine_closed(gpu: ModuleType) -> None:
    need("nixl", "nixl_cu13")
    before = gpu.stats().buffers
    with NixlGdsEngine(8, threads=2) as engine:
        with DeviceArena(1 << 20, registrars=[engine]) as arena:
            assert gpu.stats().buffers == before + 1
            with pytest.raises(ArgumentError):
                engine.register(arena.address, BLOCK)
        assert gpu.stats().buffers == before
        engine.deregister(4096)
        with pytest.raises(EngineError, match="not memory of this device"):
            engine.register(1 << 20, BLOCK)
        arena = DeviceArena(1 << 20, registrars=[engine])
    assert gpu.stats().buffers == before
    assert arena.close(0)


def test_a_hanging_transfer_keeps_neither_close_nor_the_process_and_its_memory_stays(
    gpu: ModuleType, tmp_path: FilePath
) -> None:
    need("nixl", "nixl_cu13")
    ended = run(f"""
import logging
logging.basicConfig(format="%(message)s")
from pathlib import Path
from tests.cudasim import simgpu
simgpu.load()
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.memory.device_arena import DeviceArena
from tests.engines.rig import *
engine = NixlGdsEngine(8, threads=1)
arena = DeviceArena(1 << 20, registrars=[engine])
fd = open_file(Path({str(tmp_path / "file")!r}), BLOCK)
engine.attach(fd, BLOCK)
simgpu.cufile_faults("cuFileRead=delay:30000000")
ranges = plan(fd, [0], memory(BLOCK), BLOCK)
ranges.address[0] = arena.address
transfer = engine.submit(Op.READ, ranges)
engine.close(0.2)
print(transfer.done, arena.close(0), simgpu.usage()[0], flush=True)
os._exit(0)
""")
    assert ended.stdout == "False False 1\n", ended.stderr
    assert "nixl-gds-mt engine: 1 transfers had not ended" in ended.stderr
    assert "may still use the memory" in ended.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"plugin": "GDS"},  # which reports what it lost as moved
        {"plugin": "POSIX"},
        {"in_flight_ranges": 129},
        {"threads": 0},
    ],
)
def test_settings_that_lose_data_or_make_no_sense_are_refused(
    gpu: ModuleType, settings: dict[str, object]
) -> None:
    with pytest.raises(ConfigError):
        NixlGdsEngine(**{"in_flight_ranges": 8, **settings})  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_a_typed_error(gpu: ModuleType) -> None:
    with pytest.raises(DeviceError, match="no such device"):
        NixlGdsEngine(8, device=3)


def test_gds_moves_bytes_and_believes_what_checksums_would_not(
    gpu: ModuleType, tmp_path: FilePath, content: Bytes
) -> None:
    """Pins why it takes a promise to get it. When this fails after an upgrade, NIXL has been mended."""
    need("nixl", "nixl_cu13")
    with OnDevice(NixlGdsEngine(8, plugin="GDS", results_are_checked=True)) as engine:
        fd = open_file(tmp_path / "file", len(content), content=content)
        engine.attach(fd, len(content))
        buffer = memory(4 * BLOCK)
        ranges = plan(fd, [0, 4 * BLOCK, 8 * BLOCK, BLOCK], buffer, BLOCK)
        move(engine, Op.READ, ranges)
        assert np.array_equal(buffer[2 * BLOCK : 3 * BLOCK], content[8 * BLOCK : 9 * BLOCK])
        buffer[:] = 0
        gpu.cufile_faults("batch.read@2=errno:5")
        assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
        assert [bool(block.any()) for block in buffer.reshape(4, BLOCK)].count(False) == 1
        engine.detach(fd)
        os.close(fd)

"""The engines for device memory on a real GPU, by whatever path they have there; and the same tests on the simulated one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.device import DeviceEngine, aligned
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.engines.paths import Path as IoPath
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import EngineError, MissingExtraError
from gdsstore.memory.arena import Arena
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena
from tests.cudasim.fixtures import gpu, simulator  # noqa: F401
from tests.engines.rig import BLOCK, open_file
from tests.gpu.need import PLACES, REAL, SIMULATED, memory_of, need, why_no_cufile

RANGES = 64
WINDOW = 320 << 10  # of the file and of memory, for each range: they cannot touch each other
NBYTES = RANGES * WINDOW
TIMEOUT_S = 60.0
PAGES = (1, 2, 16, 64)  # lengths of aligned ranges, in blocks
ODD = (
    (0, BLOCK - 1, 0),
    (1, 70000, 0),
    (512, 4096, 512),
    (0, 100, 77),
    (4095, 2, 1),
    (0, 131072, 8),
    (0, 3 * BLOCK, 256),
)


def kvikio() -> DeviceEngine:
    """In whatever mode there is: without a direct path and without cuFile's own fallback, in kvikio's."""
    try:
        return KvikioEngine(8)
    except MissingExtraError:
        raise
    except EngineError:
        return KvikioEngine(8, compat=True)


MAKERS: dict[str, tuple[Callable[[], DeviceEngine], tuple[str, ...]]] = {
    "kvikio": (kvikio, ("kvikio",)),
    "nixl-gds-mt": (lambda: NixlGdsEngine(64, threads=8), ("nixl",)),
    "bounce": (lambda: BounceEngine(PosixEngine(4), arena_bytes=8 << 20), ()),
}


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest) -> str:
    place = str(request.param)
    need(place)
    if place == "simulated":
        request.getfixturevalue("gpu")
    return place


@pytest.fixture(params=sorted(MAKERS))
def engine(where: str, request: pytest.FixtureRequest) -> Iterator[DeviceEngine]:
    make, packages = MAKERS[str(request.param)]
    need(where, *packages)
    if where == "real" and packages and (reason := why_no_cufile()):
        pytest.skip(reason)
    try:
        made = make()
    except EngineError as error:  # the plugin needs a cuFile that starts, with a direct path or without
        if where == "simulated" or request.param != "nixl-gds-mt":
            raise
        pytest.skip(str(error))
    with made as engine:
        yield engine


@pytest.fixture
def cuda(where: str) -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    device.close()


@pytest.fixture
def fd(engine: DeviceEngine, tmp_path: Path) -> Iterator[int]:
    """A file full of random bytes, attached."""
    content = np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8)
    fd = open_file(tmp_path / "file", NBYTES, content=content)
    os.fsync(fd)
    engine.attach(fd, NBYTES)
    yield fd
    engine.detach(fd)
    os.close(fd)


def aligned_ranges(fd: int, address: int) -> RangePlan:
    i = np.arange(RANGES, dtype=np.int64)
    length = np.array(PAGES, np.int64)[i % len(PAGES)] * BLOCK
    offset = i[::-1] * WINDOW + (i % 3) * BLOCK
    return RangePlan(
        np.full(RANGES, fd, np.int32), offset, np.uint64(address) + (i * WINDOW).astype(np.uint64), length
    )


def odd_ranges(fd: int, address: int) -> RangePlan:
    i = np.arange(RANGES, dtype=np.int64)
    shape = np.array(ODD, np.int64)[i % len(ODD)]
    skewed = (i * WINDOW + shape[:, 2]).astype(np.uint64)
    return RangePlan(
        np.full(RANGES, fd, np.int32),
        i * WINDOW + shape[:, 0],
        np.uint64(address) + skewed,
        shape[:, 1].copy(),
    )


Plans = Callable[[int, int], RangePlan]
KINDS = [pytest.param(aligned_ranges, id="aligned"), pytest.param(odd_ranges, id="odd")]


def moved(engine: DeviceEngine, op: Op, plan: RangePlan) -> None:
    transfer = engine.submit(op, plan)
    results = transfer.wait(TIMEOUT_S)
    assert results.complete(plan).all(), results
    assert transfer.done


def rows(plan: RangePlan) -> Iterator[tuple[int, int, int]]:
    return zip(plan.file_offset.tolist(), plan.address.tolist(), plan.length.tolist(), strict=True)


def expect_content(cuda: CudaDevice, base: int, plan: RangePlan, file: bytes, before: bytes) -> None:
    """The file's bytes are where the plan says, and all others of the memory are what they were."""
    want = bytearray(before)
    for offset, address, length in rows(plan):
        want[address - base : address - base + length] = file[offset : offset + length]
    got = np.empty(len(before), np.uint8)
    cuda.copy(got.ctypes.data, base, len(before))
    assert got.tobytes() == bytes(want)


def put(cuda: CudaDevice, address: int, seed: int) -> bytes:
    """Fill NBYTES of device memory with random bytes; these."""
    random = np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)
    cuda.copy(address, random.ctypes.data, NBYTES)
    return random.tobytes()


def both_ways(
    engine: DeviceEngine, cuda: CudaDevice, fd: int, path: Path, address: int, plans: Plans
) -> None:
    """Read a plan's ranges, then write them: each byte must be where it belongs, and no other may change."""
    file = path.read_bytes()
    memory = put(cuda, address, 5)
    plan = plans(fd, address)
    moved(engine, Op.READ, plan)
    expect_content(cuda, address, plan, file, memory)
    memory = put(cuda, address, 6)
    moved(engine, Op.WRITE, plan)
    want = bytearray(file)
    for offset, at, length in rows(plan):
        want[offset : offset + length] = memory[at - address : at - address + length]
    assert path.read_bytes() == bytes(want)
    counted = engine.moved.bytes_by()
    for op in Op:
        assert sum(nbytes for (each, _), nbytes in counted.items() if each is op) == plan.nbytes
    if engine.path is not IoPath.DIRECT:
        assert {by for _, by in counted} <= {engine.path, IoPath.BOUNCE}


@pytest.mark.parametrize("plans", KINDS)
def test_registered_memory_of_our_own_round_trips(
    plans: Plans, engine: DeviceEngine, cuda: CudaDevice, fd: int, tmp_path: Path, where: str
) -> None:
    with DeviceArena(NBYTES, registrars=[engine]) as arena, arena.lease(NBYTES, 0) as lease:
        both_ways(engine, cuda, fd, tmp_path / "file", lease.address, plans)
        direct = {op: engine.moved.bytes_by().get((op, IoPath.DIRECT), 0) for op in Op}
        plan = plans(fd, lease.address)
        fit = int(plan.length[aligned(plan)].sum())
        assert max(direct.values()) <= fit  # nothing else can go direct
        if where == "simulated" and engine.path is IoPath.DIRECT:
            assert direct == {Op.READ: fit, Op.WRITE: fit}


SOURCES = [
    pytest.param("real", "torch", marks=REAL),
    pytest.param("real", "cupy", marks=REAL),
    pytest.param("simulated", "simgpu", marks=SIMULATED),
]


@pytest.mark.parametrize("plans", KINDS)
@pytest.mark.parametrize(("where", "source"), SOURCES, indirect=["where"])
def test_memory_of_others_round_trips_and_is_never_called_direct(
    source: str, plans: Plans, engine: DeviceEngine, cuda: CudaDevice, fd: int, tmp_path: Path, where: str
) -> None:
    """Allocated as their users do it, in pools, and not registered."""
    if plans is odd_ranges and engine.name == "nixl-gds-mt":
        pytest.skip("NIXL moves registered memory only, and the detour keeps to O_DIRECT's alignment")
    need(where, *([source] if source != "simgpu" else []))
    with memory_of(source, NBYTES) as memory:
        both_ways(engine, cuda, fd, tmp_path / "file", memory.address, plans)
    assert not any(path is IoPath.DIRECT for _, path in engine.moved.bytes_by())


def test_an_arena_is_registered_and_let_go_of_again_and_again(
    engine: DeviceEngine, cuda: CudaDevice, fd: int, tmp_path: Path
) -> None:
    file = (tmp_path / "file").read_bytes()
    for _ in range(3):
        arena = DeviceArena(1 << 20, registrars=[engine])
        lease = arena.lease(1 << 20, 0)
        back = np.zeros(1 << 20, np.uint8)
        plan = RangePlan(
            np.array([fd], np.int32),
            np.zeros(1, np.int64),
            np.array([lease.address], np.uint64),
            np.array([1 << 20]),
        )
        moved(engine, Op.READ, plan)
        cuda.copy(back.ctypes.data, lease.address, 1 << 20)
        assert back.tobytes() == file[: 1 << 20]
        lease.release()
        assert arena.close(10.0)
        engine.deregister(arena.address)  # unknown by now: ignored


def test_an_address_that_is_not_the_device_s_moves_nothing(engine: DeviceEngine, fd: int) -> None:
    host = np.zeros(BLOCK, np.uint8)
    plan = RangePlan(
        np.array([fd], np.int32),
        np.zeros(1, np.int64),
        np.array([host.ctypes.data], np.uint64),
        np.array([BLOCK]),
    )
    results = engine.submit(Op.READ, plan).wait(TIMEOUT_S)
    assert not results.complete(plan).any()
    assert not host.any()


def test_pinned_memory_is_copied_to_the_device_and_back(where: str, cuda: CudaDevice) -> None:
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(Arena(4 << 20))
        assert host.grant.pinned, host.grant.notes
        device = stack.enter_context(DeviceArena(2 << 20))
        lease = stack.enter_context(device.lease(2 << 20, 0))
        payload, back = host.array[: 2 << 20], host.array[2 << 20 :]
        payload[:] = np.random.default_rng(9).integers(0, 256, 2 << 20, np.uint8)
        back[:] = 0
        cuda.copy(lease.address, payload.ctypes.data, 2 << 20)
        cuda.copy(back.ctypes.data, lease.address, 2 << 20)
        assert np.array_equal(payload, back)
        del payload, back

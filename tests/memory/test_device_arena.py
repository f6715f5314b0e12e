"""Device arenas on the simulated GPU: alignment, bounds, back-pressure, and the order in which memory goes away."""

from __future__ import annotations

import gc
import threading
from types import ModuleType

import pytest

from gdsstore.errors import ArgumentError, DeadlineError, DeviceError, EngineError, StoreClosedError
from gdsstore.memory import cuda
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.memory.device_memory import GPU_PAGE_BYTES

pytestmark = pytest.mark.own_process(CUDASIM_MEM_MB=64, CUDASIM_DEVICES=2)

SLOT, MIB = 4096, 1 << 20
SOON_S = 60.0


class Registry:
    """A registrar that writes down what it was asked, and whether the memory was there then."""

    def __init__(self, gpu: ModuleType) -> None:
        self._gpu = gpu
        self.calls: list[tuple[str, int]] = []
        self.allocated: list[int] = []  # live allocations at each call
        self.refuses: set[str] = set()

    def register(self, address: int, nbytes: int) -> None:
        self._note("register", address)

    def deregister(self, address: int) -> None:
        self._note("deregister", address)

    def _note(self, what: str, address: int) -> None:
        self.allocated.append(self._gpu.usage()[0])
        if what in self.refuses:
            raise EngineError(f"will not {what}")
        self.calls.append((what, address))


@pytest.fixture
def registry(gpu: ModuleType) -> Registry:
    return Registry(gpu)


def test_leases_are_aligned_and_apart_and_hold_what_was_put(gpu: ModuleType) -> None:
    with DeviceArena(16 * SLOT) as arena:
        assert arena.address % GPU_PAGE_BYTES == 0
        leases = [arena.lease(100, 0), arena.lease(SLOT + 1, 0), arena.lease(SLOT, 0)]
        assert all(lease.address % SLOT == 0 for lease in leases)
        for i, lease in enumerate(leases):
            view = gpu.DeviceBuffer.__new__(gpu.DeviceBuffer)
            view.ptr, view.nbytes = lease.address, lease.size_bytes
            view.put(bytes([i + 1]) * lease.size_bytes)
        for i, lease in enumerate(leases):
            view.ptr, view.nbytes = lease.address, lease.size_bytes
            assert view.get() == bytes([i + 1]) * lease.size_bytes
            interface = arena.view(lease).__cuda_array_interface__
            assert (interface["data"], interface["shape"]) == ((lease.address, False), (lease.size_bytes,))
            lease.release()


def test_a_small_allocation_before_does_not_misalign_it(gpu: ModuleType) -> None:
    crumbs = [gpu.DeviceBuffer(600) for _ in range(3)]
    with DeviceArena(SLOT) as arena:
        assert arena.address % GPU_PAGE_BYTES == 0
    for crumb in crumbs:
        crumb.free()


def test_a_full_arena_makes_callers_wait_and_not_fail(gpu: ModuleType) -> None:
    with DeviceArena(4 * SLOT) as arena:
        first = arena.lease(4 * SLOT, 0)
        with pytest.raises(DeadlineError):
            arena.lease(SLOT, 0.01)
        got: list[int] = []
        waiter = threading.Thread(target=lambda: got.append(_lease_and_release(arena)))
        waiter.start()
        while arena.stats().waits < 2:
            threading.Event().wait(0.001)
        assert not got
        first.release()
        waiter.join(SOON_S)
        assert got == [arena.address]


def _lease_and_release(arena: DeviceArena) -> int:
    with arena.lease(SLOT, SOON_S) as lease:
        return lease.address


def test_it_takes_what_it_was_told_and_gives_all_of_it_back(gpu: ModuleType) -> None:
    before = gpu.usage()
    with DeviceArena(8 * MIB):
        count, nbytes = gpu.usage()
        assert count == before[0] + 1
        assert nbytes - before[1] <= 8 * MIB + GPU_PAGE_BYTES
    assert gpu.usage() == before


def test_it_is_registered_once_and_deregistered_before_it_is_freed(
    gpu: ModuleType, registry: Registry
) -> None:
    before = gpu.usage()[0]
    with DeviceArena(MIB, registrars=[registry]) as arena:
        arena.lease(SLOT, 0).release()
        address = arena.address
    assert registry.calls == [("register", address), ("deregister", address)]
    assert registry.allocated == [before + 1, before + 1]
    assert gpu.usage()[0] == before


def test_a_dropped_arena_is_deregistered_and_freed_too(gpu: ModuleType, registry: Registry) -> None:
    before = gpu.usage()
    DeviceArena(MIB, registrars=[registry])
    gc.collect()
    assert [what for what, _ in registry.calls] == ["register", "deregister"]
    assert gpu.usage() == before


def test_a_refused_registration_is_the_callers_error_and_leaves_nothing(
    gpu: ModuleType, registry: Registry
) -> None:
    before = gpu.usage()
    refusing = Registry(gpu)
    refusing.refuses = {"register"}
    with pytest.raises(EngineError, match="will not register"):
        DeviceArena(MIB, registrars=[registry, refusing])
    assert [what for what, _ in registry.calls] == ["register", "deregister"]
    assert gpu.usage() == before


def test_memory_that_an_engine_does_not_let_go_of_is_not_freed(gpu: ModuleType, registry: Registry) -> None:
    before = gpu.usage()
    arena = DeviceArena(MIB, registrars=[registry])
    registry.refuses = {"deregister"}
    assert not arena.close(0)
    assert gpu.usage()[0] == before[0] + 1
    registry.refuses = set()
    assert arena.close(0)
    assert arena.close(0)
    assert gpu.usage() == before


def test_quarantined_bytes_keep_it_allocated(gpu: ModuleType) -> None:
    before = gpu.usage()[0]
    arena = DeviceArena(MIB)
    done = threading.Event()
    arena.lease(SLOT, 0).quarantine(done.is_set)
    assert not arena.close(0)
    assert gpu.usage()[0] == before + 1
    done.set()
    assert arena.close(0)
    assert gpu.usage()[0] == before


def test_what_makes_no_sense_is_refused_with_a_typed_error(gpu: ModuleType) -> None:
    before = gpu.usage()
    for size_bytes, slot_bytes in ((0, SLOT), (MIB, 512)):
        with pytest.raises(ArgumentError):
            DeviceArena(size_bytes, slot_bytes)
    with pytest.raises(DeviceError, match="no such device"):
        DeviceArena(MIB, device=2)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceArena(1 << 30)
    assert gpu.usage() == before
    with DeviceArena(MIB) as arena, DeviceArena(MIB) as other:
        lease = arena.lease(SLOT, 0)
        with pytest.raises(ArgumentError, match="host cannot see"):
            _ = lease.array
        with pytest.raises(ArgumentError, match="not of this arena"):
            other.view(lease)
        lease.release()
    with pytest.raises(StoreClosedError):
        arena.lease(SLOT, 0)
    with pytest.raises(StoreClosedError):
        arena.view(lease)


def test_an_arena_lies_on_the_device_that_was_asked_for(gpu: ModuleType) -> None:
    with DeviceArena(MIB, device=1) as arena:
        assert cuda.device_of(arena.address) == arena.device == 1


def test_the_callers_current_context_stays_as_it_was(gpu: ModuleType) -> None:
    gpu.use(1)
    with DeviceArena(MIB, device=0):
        here = gpu.DeviceBuffer(SLOT)
        assert cuda.device_of(here.ptr) == 1
        here.free()


def test_a_machine_without_a_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_driver", lambda name=cuda.LIBRARY: None)
    with pytest.raises(DeviceError, match=r"no libcuda\.so\.1"):
        DeviceArena(MIB)
    assert cuda.device_of(4096) is None

"""Registered memory is let go of in time, and a device that cannot be had, or is not needed any more, leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest

from gdsstore import DevicePieces, PageLayout, PageStatus, Store, StoreClosedError, device_moving
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import ArgumentError, DeviceError, EngineError
from tests.store.device_helpers import COUNT, LAYOUTS, WAIT_S, Cache, bind, let_go
from tests.store.helpers import make_keys, small_store, truth

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE, KVIKIO_COMPAT_MODE="OFF")

LAYOUT = LAYOUTS["mha"]
ONE_PIECE = LAYOUTS["opaque"]
SMALL = {"gpu_staging_bytes": "4MiB", "bounce_bytes": "4MiB", "measure_s": 0}


class Held:
    """What the process holds of the GPU: contexts, and allocations with their bytes."""

    def __init__(self, gpu: ModuleType) -> None:
        self._gpu = gpu
        self._before = self._now()

    def _now(self) -> tuple[int, tuple[int, int]]:
        calls = self._gpu.cuda_calls
        return calls("cuDevicePrimaryCtxRetain") - calls("cuDevicePrimaryCtxRelease"), self._gpu.usage()

    @property
    def nothing_more(self) -> bool:
        return self._now() == self._before


# --- registered memory ---

LARGE = 128 << 10  # the smallest piece that is moved in place


class Aligned:
    """Device memory for `count` pages of LARGE bytes, at multiples of 4 KiB."""

    def __init__(self, gpu: ModuleType, count: int) -> None:
        whole = gpu.DeviceBuffer((count + 1) * LARGE)
        self.buffer = whole[-whole.ptr % 4096 :][: count * LARGE]

    def part(self, first: int, stop: int) -> Any:
        return self.buffer[first * LARGE : stop * LARGE]

    def pages(self, *slots: int) -> DevicePieces:
        return DevicePieces(self.buffer.ptr + np.array(slots) * LARGE, LARGE, 0, owner=self)


def test_two_buffers_in_one_allocation_are_registered_and_let_go_of_one_by_one(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    store = device_store(path="direct")
    pages, keys, memory = bind(store, PageLayout.opaque(LARGE)), make_keys(2), Aligned(gpu, 4)
    store.device_moving(0)
    before = gpu.stats().buffers
    first, second = store.register(memory.part(0, 2)), store.register(memory.part(2, 4))
    with pytest.raises(ArgumentError, match="registered already"):
        store.register(memory.part(1, 3))
    first.close()
    assert pages.in_place(memory.pages(2, 3), 2).all()
    assert pages.save(keys, memory.pages(2, 3)).result(WAIT_S).all_ok
    assert gpu.stats().buffers == before + 1
    second.close()
    assert gpu.stats().buffers == before
    assert not pages.in_place(memory.pages(2, 3), 2).any()


@pytest.mark.parametrize(
    "engine", [lambda: KvikioEngine(4), lambda: NixlGdsEngine(16)], ids=["kvikio", "nixl"]
)
@pytest.mark.usefixtures("kvikio", "nixl")
def test_a_buffer_that_the_drive_may_still_write_is_not_deregistered(
    gpu: ModuleType, tmp_path: Path, engine: Callable[[], DeviceEngine]
) -> None:
    with small_store(tmp_path / "s", own_engine=engine(), gpu_staging_bytes="4MiB") as store:
        pages, keys, memory = bind(store, PageLayout.opaque(LARGE)), make_keys(2), Aligned(gpu, 2)
        assert pages.save(keys, truth(keys, LARGE)).result(WAIT_S).all_ok
        registration = store.register(memory.buffer)
        before, end = gpu.cufile_calls("cuFileRead"), time.monotonic() + WAIT_S
        gpu.cufile_faults("cuFileRead@1+1=delay:4000000")
        while True:
            result = pages.load(keys, memory.pages(0, 1), deadline_s=0.2).result(WAIT_S)
            if gpu.cufile_calls("cuFileRead") > before:  # on a busy machine its time may be over before
                break
            assert time.monotonic() < end
        assert result.memory_in_use
        with pytest.raises(EngineError, match="hangs"):
            registration.close()
        assert let_go(result)
        registration.close()


# --- nothing is left behind ---


def test_a_file_that_the_device_refuses_is_closed_and_costs_no_room_on_its_volume(
    device_store: Callable[..., Store], gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = device_store(path="direct")
    pages, keys = bind(store, ONE_PIECE), make_keys(COUNT)
    assert pages.save(keys, truth(keys, ONE_PIECE.page_bytes)).result(WAIT_S).all_ok
    cache = Cache(gpu, ONE_PIECE, COUNT)
    store.device_moving(0)

    def refuse(*_: object) -> NoReturn:
        raise DeviceError("cuCtxPushCurrent gave CUDA_ERROR_UNKNOWN")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(KvikioEngine, "attach", refuse)
        for _ in range(3):
            result = pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S)
            assert result.count(PageStatus.MISS_SEGMENT) == COUNT
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.usefixtures("kvikio")
def test_what_the_bounce_path_would_have_driven_is_closed_where_that_cannot_be_had(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PosixEngine] = []
    real = PosixEngine.__init__

    def init(self: PosixEngine, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(PosixEngine, "__init__", init)
    with small_store(tmp_path / "s", path="bounce", **SMALL) as store:
        at_open = len(made)
        gpu.cuda_faults("cuStreamCreate@1+1=cu:2")
        with pytest.raises(EngineError):
            store.device_moving(0)
        gpu.cuda_faults("")
        assert len(made) > at_open
        assert all(engine._closed for engine in made[at_open:])


@pytest.mark.usefixtures("kvikio")
def test_a_device_that_cannot_be_made_ready_leaves_nothing_behind(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise DeviceError("cuDeviceGetUuid gave CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(device_moving.PathMeasuring, "kept", fails)
    held = Held(gpu)
    with small_store(tmp_path / "s", **SMALL) as store, pytest.raises(DeviceError):
        store.device_moving(0)
    assert held.nothing_more


@pytest.mark.usefixtures("kvikio")
def test_without_a_thread_to_measure_in_the_device_works_all_the_same(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "gdsstore-measure":
            raise RuntimeError("can't start new thread")
        real(self)

    held = Held(gpu)
    monkeypatch.setattr(threading.Thread, "start", start)
    with small_store(tmp_path / "s", **{**SMALL, "measure_s": 1}) as store:
        cache, keys = Cache(gpu, LAYOUT, COUNT), make_keys(COUNT)
        assert bind(store, LAYOUT).save(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
        for buffer in cache.buffers:
            buffer.free()
    assert held.nothing_more


class SlowToOpen:
    """`find_ways` that waits to be told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._real = device_moving.find_ways
        patch.setattr(device_moving, "find_ways", self._find)

    def _find(self, *arguments: Any) -> Any:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        return self._real(*arguments)


@pytest.mark.usefixtures("kvikio")
def test_a_device_that_is_made_ready_while_the_store_closes_is_closed_too(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_store(tmp_path / "s", **SMALL)
    held, slow = Held(gpu), SlowToOpen(monkeypatch)
    errors: list[type] = []

    def first_use() -> None:
        try:
            store.device_moving(0)
        except Exception as error:
            errors.append(type(error))

    thread = threading.Thread(target=first_use)
    thread.start()
    assert slow.began.wait(WAIT_S)
    store.close(timeout_s=0.1)
    slow.go_on.set()
    thread.join(WAIT_S)
    assert held.nothing_more
    assert errors == [StoreClosedError]


@pytest.mark.own_process(CUDASIM_DEVICES=2, KVIKIO_COMPAT_MODE="OFF")
def test_a_device_in_use_does_not_wait_for_another_to_be_made_ready(
    device_store: Callable[..., Store], gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = device_store(path="direct")
    first = store.device_moving(0)
    slow = SlowToOpen(monkeypatch)
    other = threading.Thread(target=store.device_moving, args=(1,))
    other.start()
    assert slow.began.wait(WAIT_S)
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(store.device_moving(0)))
    asking.start()
    asking.join(WAIT_S / 12)
    at_once = list(found)
    slow.go_on.set()
    other.join(WAIT_S)
    asking.join(WAIT_S)
    assert at_once == [first]

"""What a GPU's driver, its streams and an unlucky moment can do to a store: results stay true, and blame nobody wrongly."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest

from gdsstore import PageStatus, SaveResult, Store
from gdsstore.engines.base import Op
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.streams import Stream
from gdsstore.transfer.scatter import Records
from tests.engines.bounce_rig import held
from tests.store.device_helpers import COUNT, LAYOUTS, WAIT_S, Cache, bind, let_go
from tests.store.helpers import make_keys, small_store, truth

# Without Triton's interpreter pages are moved by single copies, which go on after whoever queued them gave up.
pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE, KVIKIO_COMPAT_MODE="OFF")
slow_streams = pytest.mark.own_process(
    CUDASIM_POISON=0xEE, KVIKIO_COMPAT_MODE="OFF", CUDASIM_STREAM_DELAY_US=4000
)

NOT_READY = 600  # from cuda.h
LAYOUT = LAYOUTS["mha"]
ONE_PIECE = LAYOUTS["opaque"]


@pytest.fixture
def theirs(gpu: ModuleType) -> Iterator[Stream]:
    device = CudaDevice(0)
    stream = Stream(device)
    yield stream
    assert stream.record().wait(WAIT_S)
    stream.close()
    device.close()


# --- results ---


@slow_streams
def test_a_save_that_gives_up_says_that_the_device_still_reads_its_pages(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    store = device_store(path="direct")
    pages, cache = bind(store, LAYOUT), Cache(gpu, LAYOUT, COUNT)
    assert pages.save(make_keys(1, "first"), cache.pages([0])).result(WAIT_S).all_ok  # makes a segment
    end = time.monotonic() + WAIT_S
    with held(gpu, store.device_moving(0)._kernels._stream.handle):
        while True:
            result = pages.save(make_keys(COUNT), cache.pages(range(COUNT)), deadline_s=0.1).result(WAIT_S)
            assert result.count(PageStatus.FAILED_DEADLINE) == COUNT
            if result.memory_in_use:  # on a busy machine its time may be over before it gets there
                break
            assert time.monotonic() < end
    assert let_go(result)


@slow_streams
@pytest.mark.parametrize("fault", ["cuEventQuery@1=cu:999", "cuEventRecord@1=cu:999;cuStreamQuery@1=cu:999"])
def test_one_error_of_the_driver_does_not_free_memory_that_copies_still_write(
    device_store: Callable[..., Store], gpu: ModuleType, fault: str
) -> None:
    store = device_store(path="direct")
    pages, keys = bind(store, LAYOUT), make_keys(1)
    assert pages.save(keys, truth(keys, LAYOUT.page_bytes)).result(WAIT_S).all_ok
    cache = Cache(gpu, LAYOUT, 1)
    kernels = store.device_moving(0)._kernels
    gpu.cuda_faults(fault)
    result = pages.load(keys, cache.pages([0], streams=())).result(WAIT_S)
    running = gpu.cuda().cuStreamQuery(ctypes.c_void_p(kernels._stream.handle)) == NOT_READY
    assert result.count(PageStatus.MISS_IO) == 1
    assert result.memory_in_use or not running


def test_an_error_that_nobody_foresaw_half_way_is_told_by_the_work(
    device_store: Callable[..., Store], gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = device_store(path="direct").device_moving(0)._kernels

    def fails(*_: object) -> NoReturn:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(kernels, "_sum_records", fails)
    base = -(-gpu.DeviceBuffer(64 << 10).ptr // 4096) * 4096
    records = Records(
        np.array([base], np.uint64), 4096, np.array([[base + 4096]], np.uint64), np.array([[100]], np.int64)
    )
    pending = kernels.gather(records)
    assert pending.wait(WAIT_S)
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        _ = pending.sums


def test_a_driver_that_holds_up_whoever_queues_work_costs_others_their_deadline_and_no_more(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    store = device_store(path="direct")
    pages, cache = bind(store, LAYOUT), Cache(gpu, LAYOUT, COUNT)
    moving = store.device_moving(0)
    with moving._queueing:  # as who waits in the driver does
        future = pages.save(make_keys(COUNT), cache.pages(range(COUNT)), deadline_s=0.2)
        assert future.result(WAIT_S / 4).count(PageStatus.FAILED_DEADLINE) == COUNT


def test_threads_that_cannot_enter_the_context_do_not_cost_the_deadline(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    store = device_store(path="direct", io_deadline_s=5)
    pages, keys = bind(store, LAYOUT), make_keys(COUNT)
    store.device_moving(0)
    cache = Cache(gpu, LAYOUT, COUNT)
    gpu.cuda_faults("cuCtxSetCurrent@1+1=cu:999")
    result = pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S)
    gpu.cuda_faults("")
    assert result.count(PageStatus.FAILED_DEADLINE) == 0
    assert pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S).count(PageStatus.MISS_DEADLINE) == 0


def test_an_empty_array_is_no_pages_and_no_error(device_store: Callable[..., Store]) -> None:
    class Empty:
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            return {"shape": (0, LAYOUT.page_bytes), "typestr": "|u1", "data": (0, False), "version": 3}

    pages = bind(device_store(path="direct"), LAYOUT)
    assert pages.load(make_keys(0).reshape(0, 32), Empty()).result(WAIT_S).all_ok


# --- whose fault it is ---


@slow_streams
def test_a_slow_stream_of_the_callers_is_no_fault_of_the_drive(
    device_store: Callable[..., Store], gpu: ModuleType, theirs: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = device_store(path="direct")
    store.device_moving(0)
    cache = Cache(gpu, ONE_PIECE, 4)
    seconds: list[float] = []
    monkeypatch.setattr(store.health[Op.WRITE][0], "record", lambda **told: seconds.append(told["seconds"]))
    for number in range(10):  # one of them has a processor whenever it wants one
        seconds.clear()
        for _ in range(200):  # 0.8 s
            theirs.zero(cache.buffers[0].ptr, 64)
        memory = cache.pages(range(4), streams=(theirs.handle,))
        assert bind(store, ONE_PIECE).save(make_keys(4, number), memory).result(WAIT_S).all_ok
        assert min(seconds) > 0
        if max(seconds) < 0.7:
            break
    assert max(seconds) < 0.7


@pytest.mark.usefixtures("kvikio")
def test_copies_that_fail_are_no_fault_of_the_drive(gpu: ModuleType, tmp_path: Path) -> None:
    own = BounceEngine(PosixEngine(2), arena_bytes=4 << 20)
    with small_store(tmp_path / "s", own_engine=own, gpu_staging_bytes="4MiB") as store:
        pages, keys = bind(store, ONE_PIECE), make_keys(COUNT)
        assert pages.save(keys, truth(keys, ONE_PIECE.page_bytes)).result(WAIT_S).all_ok
        cache = Cache(gpu, ONE_PIECE, COUNT)
        store.device_moving(0)
        gpu.cuda_faults("cuMemcpyAsync@1+1=cu:719")
        result = pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S)
        gpu.cuda_faults("")
        assert result.count(PageStatus.MISS_IO) == COUNT
        assert store.health[Op.READ][0].snapshot().errors == 0


class Told:
    """A stand-in for a Selection that remembers what it is told."""

    def __init__(self, moving: Any, patch: pytest.MonkeyPatch) -> None:
        self.nbytes: list[int] = []
        self.failures = 0
        patch.setattr(moving.selection, "moved", self._moved)
        patch.setattr(moving.selection, "failed", self._failed)

    def _moved(self, op: Op, record_bytes: int, n: int, path: object, nbytes: int, seconds: float) -> None:
        self.nbytes.append(nbytes)

    def _failed(self, op: Op, path: object) -> None:
        self.failures += 1


def test_a_full_store_says_nothing_of_how_fast_a_path_is(
    device_store: Callable[..., Store], gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = device_store()
    told = Told(store.device_moving(0), monkeypatch)
    monkeypatch.setattr(store.pool, "reserve", lambda *_: [])
    cache = Cache(gpu, LAYOUT, COUNT)
    result: SaveResult = bind(store, LAYOUT).save(make_keys(COUNT), cache.pages(range(COUNT))).result(WAIT_S)
    assert result.count(PageStatus.FAILED_NO_SPACE) == COUNT
    assert sum(told.nbytes) == told.failures == 0


@slow_streams
def test_a_caller_in_a_hurry_does_not_make_a_path_a_failing_one(
    device_store: Callable[..., Store], gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = device_store()
    told = Told(store.device_moving(0), monkeypatch)
    cache = Cache(gpu, LAYOUT, COUNT)
    future = bind(store, LAYOUT).save(make_keys(COUNT), cache.pages(range(COUNT)), deadline_s=0.02)
    assert future.result(WAIT_S).count(PageStatus.FAILED_DEADLINE) == COUNT
    assert told.failures == 0

"""Pages in GPU memory through the public API: the real kvikio on the simulated GPU, the real kernels in Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gdsstore import DevicePieces, EngineError, PageLayout, PageStatus, Store
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.errors import ArgumentError, ConfigError
from tests.store.device_helpers import (
    COUNT,
    LAYOUTS,
    WAIT_S,
    Cache,
    bind,
    report,
)
from tests.store.helpers import make_keys, small_store, truth

# Device memory that nobody wrote is 0xEE; the kernels' own reads and writes are allowed, as they run on the host here.
pytestmark = pytest.mark.own_process(
    CUDASIM_POISON=0xEE, CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="OFF"
)


SLOTS = np.random.default_rng(5).permutation(3 * COUNT)
HERE, THERE = SLOTS[:COUNT], SLOTS[COUNT : 2 * COUNT]


@pytest.mark.parametrize("path", ["direct", "bounce"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_pages_come_back_into_other_slots_and_every_byte_took_its_path(
    device_store: Callable[..., Store],
    gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    path: str,
) -> None:
    layout = LAYOUTS[name]
    store = device_store(path=path)
    pages, keys = bind(store, layout), make_keys(COUNT)
    cache = Cache(gpu, layout, 3 * COUNT)
    cache.put(HERE, truth(keys, layout.page_bytes))
    monkeypatch.setattr("gdsstore.transfer.host_side.raw_sums", None)  # the checksums come from the device
    assert pages.save(keys, cache.pages(HERE)).result(WAIT_S).count(PageStatus.SAVED) == COUNT
    assert pages.load(keys, cache.pages(THERE)).result(WAIT_S).count(PageStatus.LOADED) == COUNT
    assert (cache.get(THERE) == truth(keys, layout.page_bytes)).all()
    untouched = np.setdiff1d(np.arange(3 * COUNT), np.concatenate([HERE, THERE]))
    assert (cache.get(untouched) == 0xEE).all()
    engine = {"direct": "kvikio", "bounce": "bounce"}[path]
    nbytes = COUNT * layout.record_bytes
    assert report(store) == {(path, engine, "write"): nbytes, (path, engine, "read"): nbytes}


def test_host_and_device_read_each_others_pages(device_store: Callable[..., Store], gpu: ModuleType) -> None:
    layout = LAYOUTS["mha"]
    pages = bind(device_store(path="direct"), layout)
    cache = Cache(gpu, layout, 2 * COUNT)
    keys = make_keys(2 * COUNT)
    want = truth(keys, layout.page_bytes)
    cache.put(range(COUNT), want[:COUNT])
    assert pages.save(keys[:COUNT], cache.pages(range(COUNT))).result(WAIT_S).all_ok
    assert pages.save(keys[COUNT:], want[COUNT:]).result(WAIT_S).all_ok
    on_host = np.zeros_like(want)
    assert pages.load(keys, on_host).result(WAIT_S).all_ok
    assert pages.load(keys, cache.pages(range(2 * COUNT))).result(WAIT_S).all_ok
    assert (on_host == want).all()
    assert (cache.get(range(2 * COUNT)) == want).all()


@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_a_damaged_page_is_a_miss_and_only_that_one(
    device_store: Callable[..., Store],
    gpu: ModuleType,
    tmp_path: Path,
    path: str,
) -> None:
    layout = LAYOUTS["mha"]
    store = device_store(path=path)
    pages, keys = bind(store, layout), make_keys(COUNT)
    want = truth(keys, layout.page_bytes)
    assert pages.save(keys, want).result(WAIT_S).all_ok
    file = next((tmp_path / "s" / "segments").glob("*.seg"))
    raw = bytearray(file.read_bytes())
    raw[raw.index(want[4].tobytes()) + 777] ^= 4
    file.write_bytes(raw)
    cache = Cache(gpu, layout, COUNT)
    result = pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S)
    assert np.flatnonzero(~result.ok).tolist() == [4]
    assert result.count(PageStatus.MISS_CHECKSUM) == 1
    good = np.delete(np.arange(COUNT), 4)
    assert (cache.get(good) == want[good]).all()
    assert pages.contains(keys).tolist() == result.ok.tolist()


def test_without_verification_pages_arrive_all_the_same(
    device_store: Callable[..., Store],
    gpu: ModuleType,
) -> None:
    layout = LAYOUTS["mla"]
    pages, keys = bind(device_store(path="direct", verify=False), layout), make_keys(COUNT)
    assert pages.save(keys, truth(keys, layout.page_bytes)).result(WAIT_S).all_ok
    cache = Cache(gpu, layout, COUNT)
    assert pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    assert (cache.get(range(COUNT)) == truth(keys, layout.page_bytes)).all()


def test_registered_memory_in_large_pieces_skips_the_staging(
    device_store: Callable[..., Store],
    gpu: ModuleType,
) -> None:
    layout = PageLayout.opaque(256 << 10)
    store = device_store(path="direct")
    pages, keys = bind(store, layout), make_keys(4)
    cache = Cache(gpu, layout, 4)
    cache.put(range(4), truth(keys, layout.page_bytes))
    with store.register(cache.buffers[0]) as registration:
        assert registration.direct
        assert pages.in_place(cache.pages(range(4)), 4).all()
        assert pages.save(keys, cache.pages(range(4))).result(WAIT_S).all_ok
        cache.put(range(4), np.zeros((4, layout.page_bytes), np.uint8))
        assert pages.load(keys, cache.pages(range(4))).result(WAIT_S).all_ok
        assert (cache.get(range(4)) == truth(keys, layout.page_bytes)).all()
        assert store.device_moving(0).arena.stats().peak_bytes == 0
    assert not pages.in_place(cache.pages(range(4)), 4).any()
    assert report(store) == {("direct", "kvikio", way): 1 << 20 for way in ("read", "write")}


def test_a_damaged_page_in_registered_memory_is_a_miss(
    device_store: Callable[..., Store],
    gpu: ModuleType,
    tmp_path: Path,
) -> None:
    layout = PageLayout.opaque(256 << 10)
    store = device_store(path="direct")
    pages, keys = bind(store, layout), make_keys(3)
    want = truth(keys, layout.page_bytes)
    assert pages.save(keys, want).result(WAIT_S).all_ok
    file = next((tmp_path / "s" / "segments").glob("*.seg"))
    raw = bytearray(file.read_bytes())
    raw[raw.index(want[1].tobytes()) + 200_000] ^= 1
    file.write_bytes(raw)
    cache = Cache(gpu, layout, 3)
    with store.register(cache.buffers[0]):
        result = pages.load(keys, cache.pages(range(3))).result(WAIT_S)
    assert [PageStatus(status).name for status in result.status] == ["LOADED", "MISS_CHECKSUM", "LOADED"]


@pytest.mark.parametrize("engine", ["kvikio-compat", "nixl-gds-mt"])
def test_an_engine_of_the_users_own_is_taken_and_counted_as_what_it_did(
    gpu: ModuleType,
    kvikio: ModuleType,
    tmp_path: Path,
    engine: str,
) -> None:
    own = KvikioEngine(2, compat=True) if engine == "kvikio-compat" else NixlGdsEngine(16, threads=2)
    layout = LAYOUTS["mha"]
    with small_store(tmp_path / "s", own_engine=own, gpu_staging_bytes="4MiB") as store:
        pages, keys = bind(store, layout), make_keys(COUNT)
        cache = Cache(gpu, layout, 2 * COUNT)
        cache.put(range(COUNT), truth(keys, layout.page_bytes))
        assert pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
        assert pages.load(keys, cache.pages(range(COUNT, 2 * COUNT))).result(WAIT_S).all_ok
        assert (cache.get(range(COUNT, 2 * COUNT)) == truth(keys, layout.page_bytes)).all()
        path = "compat" if engine == "kvikio-compat" else "direct"
        assert {row[0] for row in report(store)} == {path}


def test_strict_refuses_what_went_another_way(
    device_store: Callable[..., Store],
    gpu: ModuleType,
) -> None:
    layout = LAYOUTS["mha"]
    pages, keys = bind(device_store(strict=True), layout), make_keys(COUNT)
    cache = Cache(gpu, layout, COUNT)
    assert pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    gpu.cufile_faults("cuFileRead@1+1=errno:5")  # the pages arrive through host memory all the same
    assert pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    gpu.cufile_faults("")
    with pytest.raises(EngineError, match="strict = true, but kvikio took another path"):
        pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S)


def test_pages_too_large_for_the_staging_are_refused_at_once(
    device_store: Callable[..., Store],
    gpu: ModuleType,
) -> None:
    layout = PageLayout.opaque(2 << 20)
    store = device_store(
        segment_bytes="4MiB",
        staging_bytes="4MiB",
        gpu_staging_bytes="1MiB",
    )
    cache = Cache(gpu, layout, 1)
    with pytest.raises(ConfigError, match="raise gpu_staging_bytes"):
        bind(store, layout).save(make_keys(1), cache.pages([0]))


def test_many_threads_share_the_device(device_store: Callable[..., Store], gpu: ModuleType) -> None:
    layout = LAYOUTS["mla"]
    store = device_store(path="auto", workers=4)
    pages = bind(store, layout)
    wrong: list[str] = []

    def work(number: int) -> None:
        gpu.use(0)
        keys = make_keys(COUNT, number)
        cache = Cache(gpu, layout, 2 * COUNT)
        cache.put(range(COUNT), truth(keys, layout.page_bytes))
        for _ in range(3):
            if not pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok:
                wrong.append("save")
            if not pages.load(keys, cache.pages(range(COUNT, 2 * COUNT))).result(WAIT_S).all_ok:
                wrong.append("load")
            if (cache.get(range(COUNT, 2 * COUNT)) != truth(keys, layout.page_bytes)).any():
                wrong.append("bytes")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []
    assert store.device_moving(0).arena.stats().leased_bytes == 0


def test_addresses_that_are_not_the_gpus_are_refused(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    layout = LAYOUTS["opaque"]
    pages = bind(device_store(path="direct"), layout)
    on_host = np.zeros((2, layout.page_bytes), np.uint8)
    address = on_host.ctypes.data + np.arange(2) * layout.page_bytes
    with pytest.raises(ArgumentError, match="not in the memory of that GPU"):
        pages.load(make_keys(2), DevicePieces(address, layout.page_bytes, 0, on_host))

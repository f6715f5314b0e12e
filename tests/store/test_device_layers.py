"""Layer-wise loads into GPU memory: the real kvikio on the simulated GPU, the real kernels in Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gdsstore import LoadResult, PageLayout, PageStatus, Store
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.faults import parse_faults
from gdsstore.engines.faulty_device import FaultyDeviceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.pipeline import LayersComputed
from tests.store.device_helpers import LAYOUTS, WAIT_S, Cache, bind, report
from tests.store.helpers import make_keys, small_store, truth
from tests.transfer.faults import reaching
from tests.transfer.layered_rig import Forward, groups_of

pytestmark = pytest.mark.own_process(
    CUDASIM_POISON=0xEE, CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="OFF"
)

COUNT = 8
SLOTS = np.random.default_rng(3).permutation(2 * COUNT)[:COUNT]
KEYS = make_keys(COUNT)
# "odd": layers of 3,024 bytes, so that groups are cut in the middle of a piece.
CUTS: dict[str, tuple[PageLayout, list[LayerGroup]]] = {
    "mha": (LAYOUTS["mha"], groups_of([1, 2])),
    "mha-kv-first": (LAYOUTS["mha-kv-first"], groups_of([1, 1])),
    "odd": (PageLayout.mla(layers=5, latent_dim=189, page_tokens=16, dtype="fp8_e4m3"), groups_of([1, 1, 3])),
}
ENGINES: dict[str, Callable[[], DeviceEngine]] = {
    "direct": lambda: KvikioEngine(4),
    "bounce": lambda: BounceEngine(PosixEngine(2), arena_bytes=4 << 20),
}


@pytest.mark.parametrize("path", ["direct", "bounce"])
@pytest.mark.parametrize("name", sorted(CUTS))
def test_every_layer_is_there_when_it_is_told_of(
    device_store: Callable[..., Store], gpu: ModuleType, name: str, path: str
) -> None:
    layout, groups = CUTS[name]
    store = device_store(path=path)
    pages, want = bind(store, layout), truth(KEYS, layout.page_bytes)
    assert pages.save(KEYS, want).result(WAIT_S).all_ok
    cache = Cache(gpu, layout, 2 * COUNT)
    forward = Forward(layout, KEYS, lambda: cache.get(SLOTS))
    result = pages.load_layers(KEYS, cache.pages(SLOTS), forward.on_layers, groups=groups).result(WAIT_S)
    assert result.all_ok
    assert not forward.wrong
    forward.check(groups, range(COUNT))
    assert (cache.get(np.setdiff1d(np.arange(2 * COUNT), SLOTS)) == 0xEE).all()
    engine = {"direct": "kvikio", "bounce": "bounce"}[path]
    assert report(store)[path, engine, "read"] == COUNT * layout.record_bytes  # each block once
    assert store.device_moving(0).arena.stats().leased_bytes == 0


def test_a_damaged_page_is_found_at_the_end_in_whatever_group(
    device_store: Callable[..., Store], gpu: ModuleType, tmp_path: Path
) -> None:
    layout, groups = CUTS["mha"]
    pages, want = bind(device_store(path="direct"), layout), truth(KEYS, layout.page_bytes)
    assert pages.save(KEYS, want).result(WAIT_S).all_ok
    file = next((tmp_path / "s" / "segments").glob("*.seg"))
    raw = bytearray(file.read_bytes())
    for page, offset in ((1, 0), (4, layout.layer_bytes), (6, layout.page_bytes - 1)):
        raw[raw.index(want[page].tobytes()) + offset] ^= 4
    file.write_bytes(raw)
    cache = Cache(gpu, layout, COUNT)
    forward = Forward(layout, KEYS, lambda: cache.get(range(COUNT)))
    result = pages.load_layers(KEYS, cache.pages(range(COUNT)), forward.on_layers, groups=groups).result(
        WAIT_S
    )
    assert np.flatnonzero(~result.ok).tolist() == [1, 4, 6]
    assert result.count(PageStatus.MISS_CHECKSUM) == 3
    assert forward.wrong <= {1, 4, 6}
    assert pages.contains(KEYS).tolist() == result.ok.tolist()


def test_registered_memory_in_large_pieces_skips_the_staging(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    layout = PageLayout.mha(layers=2, kv_heads=8, head_dim=64, page_tokens=128, dtype="bfloat16")
    store = device_store(path="direct")
    pages, keys = bind(store, layout), KEYS[:2]
    assert pages.save(keys, truth(keys, layout.page_bytes)).result(WAIT_S).all_ok
    buffer = gpu.DeviceBuffer(2 * layout.page_bytes)
    cache = Cache(gpu, layout, 2)
    ends = (2 * np.cumsum(cache.lengths)).tolist()
    cache.buffers = [buffer[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    forward = Forward(layout, keys, lambda: cache.get(range(2)))
    with store.register(buffer):
        arena = store.device_moving(0).arena
        peak = arena.stats().peak_bytes
        future = pages.load_layers(keys, cache.pages(range(2)), forward.on_layers, groups=groups_of([1, 1]))
        assert future.result(WAIT_S).all_ok
        assert arena.stats().peak_bytes == peak
    forward.check(groups_of([1, 1]), range(2))
    assert not forward.wrong


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.usefixtures("kvikio")
def test_under_mixed_faults_no_page_is_wrong(gpu: ModuleType, tmp_path: Path, engine: str) -> None:
    layout, groups = CUTS["mha"]
    faults = parse_faults("errno:0.03,short:0.03,corrupt:0.03,misdirect:0.03")
    own = FaultyDeviceEngine(ENGINES[engine](), (), seed=3)
    cache = Cache(gpu, layout, COUNT)
    loaded = missed = 0
    with small_store(tmp_path / "s", own_engine=own, gpu_staging_bytes="4MiB", chunk_bytes="64KiB") as store:
        pages = bind(store, layout)
        for number in range(8):
            keys = make_keys(COUNT, number)
            own._faults, own._left = (), []
            assert pages.save(keys, truth(keys, layout.page_bytes)).result(WAIT_S).all_ok
            own._faults, own._left = faults, [None] * len(faults)
            forward = Forward(layout, keys, lambda: cache.get(range(COUNT)))
            result = pages.load_layers(
                keys, cache.pages(range(COUNT)), forward.on_layers, groups=groups
            ).result(WAIT_S)
            good = np.flatnonzero(result.ok)
            assert (cache.get(good) == truth(keys, layout.page_bytes)[good]).all() if len(good) else True
            assert set(good.tolist()) <= set(forward.told[-1][2])
            loaded, missed = loaded + len(good), missed + COUNT - len(good)
        assert store.device_moving(0).arena.stats().leased_bytes == 0
    assert loaded > 2 * COUNT
    assert missed > 0, "no fault had any effect"


@pytest.mark.usefixtures("kvikio")
def test_a_drive_that_hangs_costs_the_deadline_and_the_staging_is_kept_until_it_ends(
    gpu: ModuleType, tmp_path: Path
) -> None:
    layout, groups = CUTS["mha"]
    own = FaultyDeviceEngine(KvikioEngine(4), (), seed=0)
    cache = Cache(gpu, layout, COUNT)
    with small_store(tmp_path / "s", own_engine=own, gpu_staging_bytes="4MiB") as store:
        pages = bind(store, layout)
        assert pages.save(KEYS, truth(KEYS, layout.page_bytes)).result(WAIT_S).all_ok
        moving = store.device_moving(0)
        own._faults, own._left = parse_faults("hang:1"), [None]
        told: list[int] = []

        def load() -> LoadResult:
            told.clear()
            future = pages.load_layers(
                KEYS,
                cache.pages(range(COUNT)),
                lambda _, last, ok: told.append(last * int(not ok.any())),
                groups=groups,
                deadline_s=0.3,
            )
            return future.result(WAIT_S)

        result = reaching(own, load)
        assert told == [group.last for group in groups]
        assert result.count(PageStatus.MISS_DEADLINE) == COUNT
        assert result.memory_in_use
        assert moving.arena.stats().quarantined_bytes > 0
        own._faults, own._left = (), []
        own.release_hangs()
        end = time.monotonic() + WAIT_S
        while result.memory_in_use and time.monotonic() < end:
            time.sleep(0.01)
        assert (cache.get(range(COUNT)) == 0xEE).all(), "a late page was put into memory that was given back"


@pytest.mark.parametrize("path", ["direct", "bounce"])
@pytest.mark.parametrize("name", sorted(CUTS))
def test_layers_are_saved_as_the_forward_computes_them(
    device_store: Callable[..., Store], gpu: ModuleType, name: str, path: str
) -> None:
    layout, groups = CUTS[name]
    store = device_store(path=path)
    pages, want = bind(store, layout), truth(KEYS, layout.page_bytes)
    cache, computed = Cache(gpu, layout, 2 * COUNT), LayersComputed()
    future = pages.save_layers(KEYS, cache.pages(SLOTS), computed, groups=groups)
    now = np.full_like(want, 0xEE)
    for layer in range(layout.layers):
        for offset, length in layout.slices(layer, layer + 1):
            now[:, offset : offset + length] = want[:, offset : offset + length]
        cache.put(SLOTS, now)
        computed.computed(layer + 1)
    assert future.result(WAIT_S).all_ok
    engine = {"direct": "kvikio", "bounce": "bounce"}[path]
    assert report(store)[path, engine, "write"] == COUNT * layout.record_bytes  # each block once
    assert store.device_moving(0).arena.stats().leased_bytes == 0
    read = Cache(gpu, layout, COUNT)
    assert pages.load(KEYS, read.pages(range(COUNT))).result(WAIT_S).all_ok
    assert (read.get(range(COUNT)) == want).all()


@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_warm_pages_come_with_the_layers_of_the_others(
    device_store: Callable[..., Store], gpu: ModuleType, path: str
) -> None:
    layout, groups = CUTS["odd"]
    store = device_store(path=path, host_cache="8MiB", gpu_staging_bytes="1MiB")
    pages, want = bind(store, layout), truth(KEYS, layout.page_bytes)
    assert pages.save(KEYS, cache_with(gpu, layout, want).pages(range(COUNT))).result(WAIT_S).all_ok
    assert pages.prefetch(KEYS[::2]).wait(WAIT_S)
    cache = Cache(gpu, layout, 2 * COUNT)
    forward = Forward(layout, KEYS, lambda: cache.get(SLOTS))
    result = pages.load_layers(KEYS, cache.pages(SLOTS), forward.on_layers, groups=groups).result(WAIT_S)
    assert result.all_ok
    assert not forward.wrong
    forward.check(groups, range(COUNT))
    assert (cache.get(np.setdiff1d(np.arange(2 * COUNT), SLOTS)) == 0xEE).all()
    assert store.device_moving(0).arena.stats().leased_bytes == 0


def cache_with(gpu: ModuleType, layout: PageLayout, pages: np.ndarray) -> Cache:
    cache = Cache(gpu, layout, len(pages))
    cache.put(range(len(pages)), pages)
    return cache

"""Faults between the drive and the GPU: never wrong bytes, never a hang, and every page's result says what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gdsstore import PageStatus, Store
from gdsstore.engines.base import Engine
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.faults import parse_faults
from gdsstore.engines.faulty_device import FaultyDeviceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.engines.posix import PosixEngine
from tests.store.device_helpers import LAYOUTS, WAIT_S, Cache, bind, report
from tests.store.helpers import make_keys, small_store, truth
from tests.transfer.faults import reaching

pytestmark = pytest.mark.own_process(
    CUDASIM_POISON=0xEE, CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="OFF"
)

LAYOUT = LAYOUTS["opaque"]
COUNT, ROUNDS = 24, 12
ENGINES: dict[str, Callable[[], DeviceEngine]] = {
    "direct": lambda: KvikioEngine(4),
    "bounce": lambda: BounceEngine(PosixEngine(2), arena_bytes=4 << 20),
}


def faulty_store(path: Path, engine: str, faults: str, **settings: object) -> Store:
    own: Engine = FaultyDeviceEngine(ENGINES[engine](), parse_faults(faults), seed=3)
    return small_store(path, own_engine=own, gpu_staging_bytes="4MiB", **settings)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.usefixtures("gpu", "kvikio")
def test_under_mixed_faults_no_page_is_wrong(gpu: ModuleType, tmp_path: Path, engine: str) -> None:
    faults = "errno:0.01,short:0.01,corrupt:0.01,misdirect:0.01,delay:0.01:0.02"
    cache = Cache(gpu, LAYOUT, 2 * COUNT)
    loaded = missed = 0
    with faulty_store(tmp_path / "s", engine, faults, chunk_bytes="64KiB") as store:
        pages = bind(store, LAYOUT)
        for number in range(ROUNDS):
            keys = make_keys(COUNT, number)
            want = truth(keys, LAYOUT.page_bytes)
            cache.put(range(COUNT), want)
            pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S)
            for slots in (range(COUNT, 2 * COUNT), range(COUNT)):
                result = pages.load(keys, cache.pages(slots)).result(WAIT_S)
                good = np.flatnonzero(result.ok)
                assert (cache.get(np.asarray(slots)[good]) == want[good]).all()
                loaded, missed = loaded + len(good), missed + COUNT - len(good)
        assert store.device_moving(0).arena.stats().leased_bytes == 0
    assert loaded > COUNT * ROUNDS
    assert missed > 0, "no fault had any effect"


@pytest.mark.parametrize("direction", ["cuFileRead", "cuFileWrite"])
@pytest.mark.usefixtures("kvikio")
def test_faults_inside_cufile_are_never_wrong_bytes(
    device_store: Callable[..., Store], gpu: ModuleType, direction: str
) -> None:
    pages = bind(device_store(path="direct"), LAYOUT)
    keys = make_keys(COUNT)
    want = truth(keys, LAYOUT.page_bytes)
    cache = Cache(gpu, LAYOUT, 2 * COUNT)
    cache.put(range(COUNT), want)
    gpu.cufile_faults(f"{direction}@1+3=errno:5;{direction}@2+3=short:4096")
    saved = pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S)
    result = pages.load(keys, cache.pages(range(COUNT, 2 * COUNT))).result(WAIT_S)
    assert not (result.ok & ~saved.ok).any()
    good = np.flatnonzero(result.ok)
    assert len(good) > 0
    assert (cache.get(good + COUNT) == want[good]).all()


@pytest.mark.usefixtures("kvikio")
def test_reads_that_cufile_fails_arrive_another_way(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    store = device_store(path="direct")
    pages, keys = bind(store, LAYOUT), make_keys(COUNT)
    want = truth(keys, LAYOUT.page_bytes)
    cache = Cache(gpu, LAYOUT, COUNT)
    assert pages.save(keys, want).result(WAIT_S).all_ok
    gpu.cufile_faults("cuFileRead@1+1=errno:5")
    assert pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    gpu.cufile_faults("")
    assert (cache.get(range(COUNT)) == want).all()
    assert ("bounce", "kvikio", "read") in report(store)


@pytest.mark.parametrize(
    "fault", ["batch.read@1+2=errno:5", "batch.read@1+2=short:4096", "batch.write@1+2=errno:5"]
)
def test_what_the_gds_plugin_loses_without_a_word_is_never_a_hit(
    gpu: ModuleType, nixl: ModuleType, tmp_path: Path, fault: str
) -> None:
    own = NixlGdsEngine(16, plugin="GDS", results_are_checked=True)
    keys = make_keys(COUNT)
    want = truth(keys, LAYOUT.page_bytes)
    cache = Cache(gpu, LAYOUT, 2 * COUNT)
    cache.put(range(COUNT), want)
    with small_store(tmp_path / "s", own_engine=own, gpu_staging_bytes="4MiB", chunk_bytes="64KiB") as store:
        pages = bind(store, LAYOUT)
        gpu.cufile_faults(fault)
        pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S)
        # Without others in between, the staging would still hold the very pages that are not read.
        pages.save(make_keys(COUNT, "others"), cache.pages(range(COUNT, 2 * COUNT))).result(WAIT_S)
        result = pages.load(keys, cache.pages(range(COUNT, 2 * COUNT))).result(WAIT_S)
        gpu.cufile_faults("")
        good = np.flatnonzero(result.ok)
        assert len(good) < COUNT, "nothing was lost"
        assert (cache.get(good + COUNT) == want[good]).all()


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.usefixtures("kvikio")
def test_a_drive_that_hangs_costs_the_deadline_and_the_staging_is_kept_until_it_ends(
    gpu: ModuleType, tmp_path: Path, engine: str
) -> None:
    own = FaultyDeviceEngine(ENGINES[engine](), (), seed=0)
    keys = make_keys(COUNT)
    cache = Cache(gpu, LAYOUT, COUNT)
    with small_store(tmp_path / "s", own_engine=own, gpu_staging_bytes="4MiB") as store:
        pages = bind(store, LAYOUT)
        assert pages.save(keys, truth(keys, LAYOUT.page_bytes)).result(WAIT_S).all_ok
        moving = store.device_moving(0)
        own._faults, own._left = parse_faults("hang:1"), [None]
        result = reaching(
            own, lambda: pages.load(keys, cache.pages(range(COUNT)), deadline_s=0.3).result(WAIT_S)
        )
        assert result.count(PageStatus.MISS_DEADLINE) == COUNT
        assert result.memory_in_use
        assert moving.arena.stats().quarantined_bytes > 0
        own._faults, own._left = (), []
        own.release_hangs()
        end = time.monotonic() + WAIT_S
        while result.memory_in_use and time.monotonic() < end:
            time.sleep(0.01)
        assert (cache.get(range(COUNT)) == 0xEE).all(), "a late page was put into memory that was given back"
        again = pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S)
        assert again.all_ok
        assert (cache.get(range(COUNT)) == truth(keys, LAYOUT.page_bytes)).all()


@pytest.mark.usefixtures("kvikio")
def test_a_device_that_fails_is_a_miss(device_store: Callable[..., Store], gpu: ModuleType) -> None:
    pages = bind(device_store(path="direct"), LAYOUT)
    keys = make_keys(COUNT)
    assert pages.save(keys, truth(keys, LAYOUT.page_bytes)).result(WAIT_S).all_ok
    cache = Cache(gpu, LAYOUT, COUNT)
    assert pages.load(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    gpu.cuda_faults("cuEventQuery@1+1=cu:700")
    result = pages.load(keys, cache.pages(range(COUNT), streams=())).result(WAIT_S)
    saved = pages.save(make_keys(2, "new"), cache.pages(range(2), streams=())).result(WAIT_S)
    gpu.cuda_faults("")
    assert result.count(PageStatus.MISS_IO) == COUNT
    assert saved.count(PageStatus.FAILED_IO) == 2

"""The path of a device's pages: measured once and kept with the store, refused where strict, left where it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gdsstore import EngineError, Store
from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path as Way
from gdsstore.engines.select import Measurement
from gdsstore.path_measuring import slowest
from tests.store.device_helpers import COUNT, LAYOUTS, WAIT_S, Cache, bind, report
from tests.store.helpers import make_keys, truth

pytestmark = pytest.mark.own_process(
    CUDASIM_POISON=0xEE, CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="OFF"
)
NO_CUFILE = {"CUFILESIM_NVFS": "0", "CUFILESIM_COMPAT": "0"}
COMPAT_CUFILE = {"CUFILESIM_NVFS": "0", "CUFILESIM_COMPAT": "1"}

ROOM = {"gpu_staging_bytes": "32MiB", "bounce_bytes": "16MiB"}


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("paths-*.json"))


def measure(store: Store) -> None:
    """Until there are figures for everything: on a busy machine the time for it may be over before."""
    end = time.monotonic() + WAIT_S
    seconds = 0.5
    while time.monotonic() < end:
        store.measure_paths(seconds=seconds)
        if {each.path for each in store.device_moving(0)._measuring.kept() or ()} == {Way.DIRECT, Way.BOUNCE}:
            return
        seconds *= 2
    pytest.fail("the paths could not be measured")


def test_the_paths_are_measured_once_and_the_result_outlives_the_store(
    device_store: Callable[..., Store], gpu: ModuleType, tmp_path: Path
) -> None:
    with device_store(**ROOM) as store:
        assert kept(tmp_path / "s") == []
        measure(store)
        (file,) = kept(tmp_path / "s")
        first = file.read_bytes()
        assert {row[3] for row in json.loads(first)["bytes_per_s"]} == {"direct", "bounce"}
        assert report(store) == {}, "the scratch file's bytes are nobody's pages"
    with device_store(**ROOM, measure_s=5) as store:
        moving = store.device_moving(0)
        moving.route(Op.READ, 256 << 10, 1)
        (cell,) = moving.selection.cells()
        assert cell.bytes_per_s.keys() == {Way.DIRECT, Way.BOUNCE}
        assert file.read_bytes() == first


def test_what_was_measured_on_another_machine_does_not_count(
    device_store: Callable[..., Store], gpu: ModuleType, tmp_path: Path
) -> None:
    with device_store(**ROOM) as store:
        measure(store)
    (file,) = kept(tmp_path / "s")
    content = json.loads(file.read_text())
    content["fingerprint"]["kernel"] = "of another machine"
    file.write_text(json.dumps(content))
    with device_store(**ROOM) as store:
        moving = store.device_moving(0)
        moving.route(Op.READ, 256 << 10, 1)
        assert moving.selection.cells()[0].bytes_per_s == {}


def test_the_first_use_measures_beside_the_calls(
    device_store: Callable[..., Store], gpu: ModuleType, tmp_path: Path
) -> None:
    layout = LAYOUTS["opaque"]
    with device_store(**ROOM, measure_s=4) as store:
        cache, keys = Cache(gpu, layout, COUNT), make_keys(COUNT)
        cache.put(range(COUNT), truth(keys, layout.page_bytes))
        assert bind(store, layout).save(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
        end = time.monotonic() + WAIT_S
        while not kept(tmp_path / "s") and time.monotonic() < end:
            time.sleep(0.02)
        assert len(kept(tmp_path / "s")) == 1


@pytest.mark.own_process(CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="ON", **NO_CUFILE)
def test_without_a_direct_path_pages_bounce_and_strict_refuses(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    layout = LAYOUTS["mha"]
    cache, keys = Cache(gpu, layout, COUNT), make_keys(COUNT)
    cache.put(range(COUNT), truth(keys, layout.page_bytes))
    store = device_store("loose")
    assert bind(store, layout).save(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    assert {row[0] for row in report(store)} == {"bounce"}
    strict = bind(device_store("strict", strict=True), layout)
    with pytest.raises(EngineError, match=r"strict = true takes nothing but the direct path.*doctor"):
        strict.save(keys, cache.pages(range(COUNT)))


@pytest.mark.own_process(
    CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="OFF", **COMPAT_CUFILE
)
def test_cufile_that_was_asked_for_and_falls_back_is_counted_as_compat(
    device_store: Callable[..., Store], gpu: ModuleType
) -> None:
    layout = LAYOUTS["mha"]
    store = device_store(path="direct")
    cache, keys = Cache(gpu, layout, 2 * COUNT), make_keys(COUNT)
    cache.put(range(COUNT), truth(keys, layout.page_bytes))
    pages = bind(store, layout)
    assert pages.save(keys, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    assert pages.load(keys, cache.pages(range(COUNT, 2 * COUNT))).result(WAIT_S).all_ok
    assert (cache.get(range(COUNT, 2 * COUNT)) == truth(keys, layout.page_bytes)).all()
    nbytes = COUNT * layout.record_bytes
    assert report(store) == {("compat", "kvikio", way): nbytes for way in ("read", "write")}


def test_pages_striped_over_volumes_wait_for_the_slowest() -> None:
    def cell(path: Way, speed: float) -> Measurement:
        return Measurement(Op.READ, 1 << 20, 8, path, speed)

    found = [cell(Way.DIRECT, 5.0), cell(Way.BOUNCE, 3.0), cell(Way.DIRECT, 2.0), cell(Way.BOUNCE, 4.0)]
    assert sorted(slowest(found)) == sorted([cell(Way.DIRECT, 2.0), cell(Way.BOUNCE, 3.0)])

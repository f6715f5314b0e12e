"""SGLang's controllers move pages device -> host -> store -> host -> device unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_fixtures import MHA, PAGE_SIZE, controller_stack
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

from sglang_backend.storage import GdsStoreHiCache
from tests.sglang_backend.backends import extra_config
from tests.sglang_cpu.tests.test_l3_controllers import LAYOUTS, RoundTrip

INTERFACES = {"v1": 1, "flat": None}


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(("kind", "layout", "io_backend"), LAYOUTS)
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "base"])
def test_pages_survive_the_trip_and_the_server_that_stored_them(
    kind: str, layout: str, io_backend: str, interface: str, hybrid: bool, tmp_path: Path
) -> None:
    config = extra_config(tmp_path / "store", interface_v1=INTERFACES[interface])
    with controller_stack(kind, layout, io_backend, "dynamic", config, hybrid=hybrid) as stack:
        assert isinstance(stack.controller.storage_backend, GdsStoreHiCache)
        trip = RoundTrip(stack, hybrid=hybrid)
        expected = trip.store()
        host_rows, completed = trip.prefetch()
        assert completed == len(trip.tokens)
        assert all(map(torch.equal, trip.rows_of_every_layer(trip.load(host_rows)), expected))
    with controller_stack(kind, layout, io_backend, "dynamic", config, hybrid=hybrid) as stack:
        trip = RoundTrip(stack, hybrid=hybrid)
        host_rows, completed = trip.prefetch()
        assert completed == len(trip.tokens)
        assert all(map(torch.equal, trip.rows_of_every_layer(trip.load(host_rows)), expected))


@pytest.mark.parametrize(("first", "second"), [("v1", "flat"), ("flat", "v1")])
def test_pages_of_one_interface_are_not_read_through_the_other_where_their_bytes_differ(
    first: str, second: str, tmp_path: Path
) -> None:
    """MHA, layer_first (tests/sglang_cpu/contracts.md, trap 5)."""
    for interface, found in ((first, False), (second, False), (first, True)):
        config = extra_config(tmp_path / "store", interface_v1=INTERFACES[interface])
        with controller_stack(MHA, "layer_first", "kernel", "dynamic", config, hybrid=True) as stack:
            trip = RoundTrip(stack, hybrid=True)
            backend = stack.controller.storage_backend
            assert backend.batch_exists(trip.keys) == (len(trip.keys) if found else 0)
            assert backend.batch_exists_v2(trip.keys).kv_hit_pages == (len(trip.keys) if found else 0)
            assert [backend.exists(key) for key in trip.keys[:2]] == [found] * 2
            if not found:
                trip.store()


def test_more_pages_than_a_batch_holds_survive_too(tmp_path: Path) -> None:
    pages = STORAGE_BATCH_SIZE + 1
    config = extra_config(tmp_path / "store")
    with controller_stack(
        MHA,
        "page_first",
        "kernel",
        "dynamic",
        config,
        hybrid=True,
        device_tokens=2 * pages * PAGE_SIZE,
    ) as stack:
        trip = RoundTrip(stack, hybrid=True, pages=pages)
        expected = trip.store()
        host_rows, completed = trip.prefetch()
        assert completed == len(trip.tokens)
        assert all(map(torch.equal, trip.rows_of_every_layer(trip.load(host_rows)), expected))


def test_a_page_lost_after_the_query_ends_the_prefetch_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = 10
    config = extra_config(tmp_path / "store")
    with controller_stack(MHA, "page_first", "kernel", "dynamic", config, hybrid=True) as stack:
        backend = stack.controller.storage_backend
        trip = RoundTrip(stack, hybrid=True)
        expected = trip.store()
        raw = bytes.fromhex(trip.keys[lost])
        assert backend._pools.bound("kv").delete([raw]).all()
        assert backend.batch_exists(trip.keys) == lost
        monkeypatch.setattr(backend, "batch_exists", lambda keys, extra_info=None: len(keys))
        host_rows, completed = trip.prefetch()
        assert completed == lost * PAGE_SIZE
        restored = trip.rows_of_every_layer(trip.load(host_rows[:completed]))
    assert all(torch.equal(rows, want[:completed]) for rows, want in zip(restored, expected, strict=True))

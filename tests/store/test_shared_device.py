"""Pages from the shared host cache into GPU memory: checked by what arrived there."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gdsstore import Store
from gdsstore.memory.streams import Stream
from tests.store.device_helpers import COUNT, LAYOUTS, WAIT_S, Cache, bind
from tests.store.helpers import make_keys, truth
from tests.store.shared_tiers import ForgedTier, link

pytestmark = pytest.mark.own_process(
    CUDASIM_POISON=0xEE, CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="OFF"
)
KEYS = make_keys(COUNT)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_pages_reach_the_gpu_without_the_drive_and_wrong_ones_do_not(
    device_store: Callable[..., Store], gpu: ModuleType, name: str
) -> None:
    layout = LAYOUTS[name]
    store, tier = device_store(path="bounce"), ForgedTier(layout.record_bytes)
    link(store, tier)
    pages, want = bind(store, layout), truth(KEYS, layout.page_bytes)
    assert pages.save(KEYS, want).result(WAIT_S).all_ok
    there = want.copy()
    there[3, -1] ^= 1
    tier.put(KEYS[:8], there[:8])
    cache = Cache(gpu, layout, COUNT)
    assert pages.load(KEYS, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    assert (cache.get(range(COUNT)) == want).all()
    stats = store.stats()
    assert stats["pages_loaded_from_shared"] == 7
    assert stats["shared_pages_refused"] == 1
    assert stats["drive_bytes_read"] == (COUNT - 7) * layout.record_bytes
    assert tier.leases == 0


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layers_reach_the_gpu_without_the_drive_and_wrong_ones_do_not(
    device_store: Callable[..., Store], gpu: ModuleType, name: str
) -> None:
    layout = LAYOUTS[name]
    store, tier = device_store(path="bounce"), ForgedTier(layout.record_bytes)
    link(store, tier)
    pages, want = bind(store, layout), truth(KEYS, layout.page_bytes)
    assert pages.save(KEYS, want).result(WAIT_S).all_ok
    there = want.copy()
    there[3, -1] ^= 1
    tier.put(KEYS[:8], there[:8])
    cache = Cache(gpu, layout, COUNT)
    told: list[tuple[int, int]] = []

    def on_layers(first: int, last: int, ok: Any) -> None:
        gpu.use(0)
        now = cache.get(range(COUNT))
        for offset, length in layout.slices(first, last):
            part = slice(offset, offset + length)
            assert (now[ok, part] == want[ok, part]).all()
        told.append((last, int(ok.sum())))

    assert pages.load_layers(KEYS, cache.pages(range(COUNT)), on_layers).result(WAIT_S).all_ok
    assert (cache.get(range(COUNT)) == want).all()
    assert told[-1] == (layout.layers, COUNT)
    assert all(count == COUNT for _, count in told)
    stats = store.stats()
    assert stats["pages_loaded_from_shared"] == 7
    assert stats["shared_pages_refused"] == 1
    assert stats["drive_bytes_read"] == (COUNT - 7) * layout.record_bytes
    assert tier.leases == 0


def test_what_changes_on_its_way_to_the_gpu_is_found_out(
    device_store: Callable[..., Store], gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS["mha"]
    store, tier = device_store(path="bounce"), ForgedTier(layout.record_bytes)
    link(store, tier)
    pages, want = bind(store, layout), truth(KEYS, layout.page_bytes)
    assert pages.save(KEYS, want).result(WAIT_S).all_ok
    tier.put(KEYS, want)
    copy_each = Stream.copy_each

    def scribbled(stream: Stream, *ranges: Any) -> Any:
        tier.arena.array[:: 3 * layout.record_bytes] ^= 1  # of every third record, the first byte
        return copy_each(stream, *ranges)

    monkeypatch.setattr(Stream, "copy_each", scribbled)
    cache = Cache(gpu, layout, COUNT)
    assert pages.load(KEYS, cache.pages(range(COUNT))).result(WAIT_S).all_ok
    assert (cache.get(range(COUNT)) == want).all()
    assert store.stats()["shared_pages_refused"] == COUNT // 3


@pytest.mark.parametrize("how", ["load", "load_layers"])
def test_a_copy_that_is_late_keeps_its_records_until_it_has_ended(
    device_store: Callable[..., Store], gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    layout = LAYOUTS["mha"]
    store, tier = device_store(path="bounce"), ForgedTier(layout.record_bytes)
    link(store, tier)
    pages, want = bind(store, layout), truth(KEYS, layout.page_bytes)
    assert pages.save(KEYS, want).result(WAIT_S).all_ok
    tier.put(KEYS, want)

    class Late:
        done = False

    late = [Late(), Late()]
    for number, each in enumerate(late):
        cache = Cache(gpu, layout, COUNT)
        told: list[tuple[int, bool]] = []

        def on_layers(first: int, last: int, ok: Any, told: list[tuple[int, bool]] = told) -> None:
            told.append((last, bool(ok.any())))

        with monkeypatch.context() as patch:
            patch.setattr("gdsstore.transfer.mover.Mover.bring", lambda *given, each=each: each)
            result = (
                pages.load(KEYS, cache.pages(range(COUNT)))
                if how == "load"
                else pages.load_layers(KEYS, cache.pages(range(COUNT)), on_layers)
            ).result(WAIT_S)
        assert not result.ok.any()
        assert result.memory_in_use
        assert tier.leases == number + 1
        assert told == [] if how == "load" else [(layout.layers, False)]
    late[1].done = True
    memory = np.zeros((COUNT, layout.page_bytes), np.uint8)
    assert pages.load(KEYS, memory).result(WAIT_S).all_ok
    assert tier.leases == 1
    late[0].done = True
    memory = np.zeros((COUNT, layout.page_bytes), np.uint8)
    assert pages.load(KEYS, memory).result(WAIT_S).all_ok
    assert tier.leases == 0

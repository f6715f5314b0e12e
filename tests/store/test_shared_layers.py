"""Layer-wise loads in front of which there is a shared host cache: its pages come with the layers of the drives' pages, and
whatever is wrong with them is found out before a layer is told of, or at the latest in the result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore import PageLayout, PageStatus, Store
from gdsstore.drive_pages import DrivePages
from gdsstore.errors import StoreError
from gdsstore.transfer.host_side import HostSide
from gdsstore.warm_layers import WarmLayers
from tests.store.helpers import WAIT_S, make_keys, memory_directory, save, small_store, truth
from tests.store.shared_tiers import ForgedTier, daemon, link
from tests.transfer.layered_rig import (
    COUNT,
    EVERYONE,
    GROUPS,
    KEYS,
    LAYOUT,
    LAYOUTS,
    PieceMemory,
    assert_loaded_is_true,
    bind,
    cuts_of,
    groups_of,
    load_layers,
)

PAGE = LAYOUT.page_bytes


@pytest.fixture
def tier() -> ForgedTier:
    return ForgedTier(LAYOUT.record_bytes)


@pytest.fixture
def store(tmp_path: Path, tier: ForgedTier) -> Iterator[Store]:
    with small_store(tmp_path / "s", chunk_bytes="64KiB") as opened:
        link(opened, tier)
        assert save(bind(opened), KEYS, PAGE).all_ok
        yield opened
    assert tier.leases == 0


def count(store: Store, name: str) -> int:
    return int(store.stats().get(name, 0))


def test_shared_pages_come_layer_by_layer_without_the_drive(store: Store, tier: ForgedTier) -> None:
    tier.put(KEYS, truth(KEYS, PAGE))
    result, forward, memory = load_layers(store)
    assert result.all_ok
    forward.check(GROUPS, EVERYONE)
    assert not forward.wrong
    assert_loaded_is_true(result, KEYS, LAYOUT, memory)
    assert count(store, "drive_bytes_read") == 0
    assert count(store, "pages_loaded") == count(store, "pages_loaded_from_shared") == COUNT


def test_layers_are_told_of_before_later_ones_are_copied(
    store: Store, tier: ForgedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(KEYS, truth(KEYS, PAGE))
    memory, seen = PieceMemory(COUNT, PAGE), []
    bring = WarmLayers.bring

    def watched(me: WarmLayers, first: int, last: int) -> Any:
        offset = LAYOUT.slices(LAYOUT.layers - 1, LAYOUT.layers)[-1].offset + 4096
        seen.append((last, bool((memory.pages()[:, offset:] == truth(KEYS, PAGE)[:, offset:]).any())))
        return bring(me, first, last)

    monkeypatch.setattr(WarmLayers, "bring", watched)
    result, forward, _ = load_layers(store, memory=memory)
    assert result.all_ok
    assert not forward.wrong
    assert [last for last, _ in seen] == [group.last for group in GROUPS]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    shared=st.sets(st.integers(0, 15)),
    wrong=st.sets(st.integers(0, 15), max_size=4),
    absent=st.sets(st.integers(0, 15), max_size=4),
    piece_cuts=st.lists(st.integers(1, 60_000), max_size=6),
    planned=st.booleans(),
    verify=st.booleans(),
    data=st.data(),
)
def test_whatever_is_shared_right_or_wrong_the_layers_are_there_when_they_are_told_of(
    name: str,
    shared: set[int],
    wrong: set[int],
    absent: set[int],
    piece_cuts: list[int],
    planned: bool,
    verify: bool,
    data: st.DataObject,
) -> None:
    layout, keys = LAYOUTS[name], make_keys(16)
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    there = sorted(set(range(16)) - absent)
    tier = ForgedTier(layout.record_bytes)
    memory = PieceMemory(16, layout.page_bytes, piece_cuts, 16)
    with memory_directory() as directory, small_store(directory / "s", verify=verify) as store:
        link(store, tier)
        if there:
            assert save(bind(store, layout), keys[there], layout.page_bytes).all_ok
        pages = truth(keys, layout.page_bytes)
        for i in wrong:
            pages[i, data.draw(st.integers(0, layout.page_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
        tier.put(keys[sorted(shared)], pages[sorted(shared)])
        result, forward, memory = load_layers(store, keys, layout, None if planned else groups, memory)
        assert np.flatnonzero(result.ok).tolist() == there
        assert_loaded_is_true(result, keys, layout, memory)
        assert not forward.wrong
        if planned:
            assert forward.told[0][0] == 0
            assert forward.told[-1][1] == layout.layers
        elif there:
            forward.check(groups, there)
        borrowed = shared - absent
        assert count(store, "pages_loaded_from_shared") == len(borrowed - wrong)
        assert count(store, "shared_pages_refused") == len(borrowed & wrong)
        assert count(store, "drive_bytes_read") == (len(there) - len(borrowed - wrong)) * layout.record_bytes
        assert count(store, "pages_loaded") == len(there)
        assert count(store, "pages_miss_absent") == len(absent)
        assert tier.leases == 0


@pytest.mark.parametrize("at", range(4))
def test_bytes_that_change_between_the_look_and_the_copy_are_never_loaded(
    store: Store, tier: ForgedTier, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    tier.put(KEYS, truth(KEYS, PAGE))
    bring, calls = WarmLayers.bring, iter(range(100))

    def scribbled(me: WarmLayers, first: int, last: int) -> Any:
        if next(calls) == at % len(GROUPS):
            records = tier.arena.array[: COUNT * tier.record_bytes].reshape(COUNT, tier.record_bytes)
            records[3, -1] ^= 1  # of the last layers, which no group has copied yet
            records[7, PAGE // 2] ^= 1
        return bring(me, first, last)

    monkeypatch.setattr(WarmLayers, "bring", scribbled)
    result, forward, memory = load_layers(store)
    assert_loaded_is_true(result, KEYS, LAYOUT, memory)
    assert not result.ok[3]
    assert result.status[3] == PageStatus.MISS_RECLAIMED
    assert result.ok[[i for i in EVERYONE if i not in (3, 7)]].all()
    assert [last for _, last, _ in forward.told] == [group.last for group in GROUPS]
    monkeypatch.setattr(WarmLayers, "bring", bring)
    result, forward, memory = load_layers(store)
    assert result.all_ok, "the drive has them"
    assert not forward.wrong


def test_pages_without_layers_come_from_the_shared_cache_too(tmp_path: Path, tier: ForgedTier) -> None:
    layout = PageLayout.opaque(PAGE)
    with small_store(tmp_path / "o") as store:
        link(store, tier)
        assert save(bind(store, layout), KEYS, PAGE).all_ok
        tier.put(KEYS[:7], truth(KEYS[:7], PAGE))
        result, forward, memory = load_layers(store, KEYS, layout, None)
        assert result.all_ok
        assert not forward.wrong
        assert_loaded_is_true(result, KEYS, layout, memory)
        assert count(store, "pages_loaded_from_shared") == 7


def test_without_time_nothing_is_copied_and_all_layers_are_told_of(store: Store, tier: ForgedTier) -> None:
    tier.put(KEYS, truth(KEYS, PAGE))
    lease = tier.lease

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return lease(*given)

    tier.lease = slow  # type: ignore[method-assign,assignment]
    result, forward, memory = load_layers(store, deadline_s=0.2)
    assert result.count(PageStatus.MISS_DEADLINE) == COUNT
    assert count(store, "pages_miss_deadline") == COUNT
    assert forward.told[-1][1] == LAYOUT.layers
    assert not any(good for _, _, good in forward.told)
    assert (memory.pages() == 0xEE).all()


@pytest.mark.parametrize("call", range(6))
def test_a_copy_that_fails_in_any_way_costs_its_pages_and_no_layer_is_kept_back(
    store: Store, tier: ForgedTier, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    tier.put(KEYS[:5], truth(KEYS[:5], PAGE))
    bring, calls = HostSide.bring, iter(range(100))

    def full(*arguments: Any) -> object:
        if next(calls) == call:
            raise MemoryError
        return bring(*arguments)

    monkeypatch.setattr(HostSide, "bring", full)
    result, forward, memory = load_layers(store)
    assert_loaded_is_true(result, KEYS, LAYOUT, memory)
    assert not forward.wrong
    assert [last for _, last, _ in forward.told] == [group.last for group in GROUPS]
    assert result.ok[5:].all()


def test_records_are_leased_until_the_last_layer_whatever_the_drive_does(
    store: Store, tier: ForgedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise StoreError("the catalog is gone")

    tier.put(KEYS[:5], truth(KEYS[:5], PAGE))
    bring, leases = WarmLayers.bring, []

    def watched(me: WarmLayers, first: int, last: int) -> object:
        leases.append(tier.leases)
        return bring(me, first, last)

    monkeypatch.setattr(WarmLayers, "bring", watched)
    monkeypatch.setattr(DrivePages, "load", gone)
    told: list[int] = []
    memory = PieceMemory(COUNT, PAGE)
    future = bind(store).load_layers(
        KEYS, memory.pieces(), lambda first, last, ok: told.append(last), groups=GROUPS
    )
    with pytest.raises(StoreError, match="gone"):
        future.result(WAIT_S)
    assert told[-1] == LAYOUT.layers
    assert leases
    assert all(leases)
    assert tier.leases == 0


@pytest.mark.parametrize("what", ["away", "other records"])
def test_a_daemon_that_is_of_no_use_changes_nothing(store: Store, tier: ForgedTier, what: str) -> None:
    tier.put(KEYS, truth(KEYS, PAGE))
    tier.there = what != "away"
    tier.claims = 4096 if what == "other records" else None
    result, forward, _ = load_layers(store)
    assert result.all_ok
    assert not forward.wrong
    forward.check(GROUPS, EVERYONE)
    assert count(store, "pages_loaded_from_shared") == 0


def test_pages_that_nobody_has_are_asked_of_nobody(store: Store, tier: ForgedTier) -> None:
    result, forward, _ = load_layers(store, make_keys(5, "unknown"))
    assert result.count(PageStatus.MISS_ABSENT) == 5
    assert forward.told[-1][1] == LAYOUT.layers
    assert tier.asked == 0


@pytest.mark.parametrize("dies", ["before", "between", "never"])
def test_a_daemon_that_dies_costs_nothing_but_speed(tmp_path: Path, dies: str) -> None:
    layout = PageLayout.opaque(8192)
    keys = make_keys(60)
    with small_store(tmp_path / "s") as store:
        pages = bind(store, layout)
        assert save(pages, keys).all_ok
        with daemon(tmp_path / "s") as node:
            link(store, node)
            assert pages.prefetch(keys[:50]).wait(WAIT_S)
            lease = node.lease

            def kill() -> None:
                os.kill(node.process.pid, signal.SIGKILL)
                node.process.wait(WAIT_S)

            def last(*given: Any) -> object:
                found = lease(*given)
                if dies == "between":
                    kill()
                return found

            node.lease = last  # type: ignore[method-assign,assignment]
            if dies == "before":
                kill()
            result, forward, memory = load_layers(store, keys, layout, None)
            assert result.all_ok
            assert not forward.wrong
            assert_loaded_is_true(result, keys, layout, memory)
            assert count(store, "pages_loaded_from_shared") == (0 if dies == "before" else 50)

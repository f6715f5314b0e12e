"""Layer-wise loads in front of which there is a host cache: its pages come with the layers of the drives' pages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore import Store
from gdsstore.drive_pages import DrivePages
from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind
from gdsstore.errors import StoreError
from gdsstore.transfer.host_side import HostSide
from gdsstore.warm_layers import WarmLayers
from tests.store.helpers import WAIT_S, make_keys, memory_directory, save, small_store, truth
from tests.transfer.faults import fault, faulty
from tests.transfer.layered_rig import (
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


def read_bytes(store: Store) -> int:
    return int(store.stats().get("drive_bytes_read", 0))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    warm=st.sets(st.integers(0, 15)),
    absent=st.sets(st.integers(0, 15), max_size=4),
    piece_cuts=st.lists(st.integers(1, 60_000), max_size=6),
    planned=st.booleans(),
    data=st.data(),
)
def test_whatever_is_warm_the_layers_are_there_when_they_are_told_of(
    name: str, warm: set[int], absent: set[int], piece_cuts: list[int], planned: bool, data: st.DataObject
) -> None:
    layout, keys = LAYOUTS[name], make_keys(16)
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    there = sorted(set(range(16)) - absent)
    memory = PieceMemory(16, layout.page_bytes, piece_cuts, 16)
    with memory_directory() as directory:
        with small_store(directory / "s") as store:
            if there:
                assert save(bind(store, layout), keys[there], layout.page_bytes).all_ok
        with small_store(directory / "s", host_cache="8MiB") as store:
            bound = bind(store, layout)
            fetched = sorted(warm - absent)
            if fetched:
                assert bound.prefetch(keys[fetched]).wait(WAIT_S)
            before = read_bytes(store)
            result, forward, memory = load_layers(store, keys, layout, None if planned else groups, memory)
            assert np.flatnonzero(result.ok).tolist() == there
            assert_loaded_is_true(result, keys, layout, memory)
            assert not forward.wrong
            if planned:
                assert forward.told[0][0] == 0
                assert forward.told[-1][1] == layout.layers
            elif there:
                forward.check(groups, there)
            assert read_bytes(store) - before == (len(there) - len(fetched)) * layout.record_bytes
            assert store.stats()["pages_loaded"] >= len(there)
            # What came from the drives is warm now.
            again, forward, memory = load_layers(store, keys, layout, None)
            assert np.flatnonzero(again.ok).tolist() == there
            assert read_bytes(store) - before == (len(there) - len(fetched)) * layout.record_bytes


def load_layers_of(store: Store) -> None:
    result, forward, memory = load_layers(store)
    assert result.all_ok
    assert not forward.wrong
    assert_loaded_is_true(result, KEYS, LAYOUT, memory)
    forward.check(GROUPS, range(len(KEYS)))


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_pages_that_no_drive_has_yet_are_loaded(tmp_path: Path, policy: str) -> None:
    with small_store(tmp_path / "s", host_cache="8MiB", write_policy=policy) as store:
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok
        assert store.stats().get("drive_bytes_written", 0) == 0
        load_layers_of(store)
        assert read_bytes(store) == 0


def test_drives_that_fail_cost_their_pages_and_not_the_warm_ones(tmp_path: Path) -> None:
    own = faulty(fault(FaultKind.ERRNO, op=Op.READ))
    with small_store(tmp_path / "s") as store:
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok
    with small_store(tmp_path / "s", host_cache="8MiB", own_engine=own) as store:
        own._faults, faults = (), own._faults
        assert bind(store).prefetch(KEYS[:5]).wait(WAIT_S)
        own._faults = faults
        result, forward, memory = load_layers(store)
        assert np.flatnonzero(result.ok).tolist() == [0, 1, 2, 3, 4]
        assert_loaded_is_true(result, KEYS, LAYOUT, memory)
        assert forward.told[-1][2] == [0, 1, 2, 3, 4]
        assert not forward.wrong


def test_after_the_deadline_nothing_is_copied_and_all_layers_are_told_of(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", host_cache="8MiB") as store:
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok
        load_layers_of(store)
        memory = PieceMemory(len(KEYS), LAYOUT.page_bytes)
        result, forward, memory = load_layers(store, memory=memory, deadline_s=0.0)
        assert not result.ok.any()
        assert forward.told[-1][1] == LAYOUT.layers
        assert not any(good for _, _, good in forward.told)
        assert (memory.pages() != truth(KEYS, LAYOUT.page_bytes)).any(axis=1).all()


def test_records_are_not_touched_after_they_were_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise StoreError("the catalog is gone")

    pins: list[int] = []
    bring = WarmLayers.bring
    with small_store(tmp_path / "s") as store:
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok
    with small_store(tmp_path / "s", host_cache="8MiB") as store:

        def watched(me: WarmLayers, first: int, last: int) -> object:
            cache = store.stats()["host_cache"]
            assert cache is not None
            pins.append(cache["pins"])
            return bring(me, first, last)

        assert bind(store).prefetch(KEYS[:5]).wait(WAIT_S)
        monkeypatch.setattr(WarmLayers, "bring", watched)
        monkeypatch.setattr(DrivePages, "load", gone)
        told: list[int] = []
        memory = PieceMemory(len(KEYS), LAYOUT.page_bytes)
        future = bind(store).load_layers(
            KEYS, memory.pieces(), lambda first, last, ok: told.append(last), groups=GROUPS
        )
        with pytest.raises(StoreError, match="gone"):
            future.result(WAIT_S)
        assert told[-1] == LAYOUT.layers
        assert pins
        assert all(pins)


@pytest.mark.parametrize("call", range(6))
def test_a_copy_that_fails_in_any_way_costs_its_pages_and_no_layer_is_kept_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    bring, calls = HostSide.bring, itertools.count()

    def full(*arguments: Any) -> object:
        if next(calls) == call:
            raise MemoryError
        return bring(*arguments)

    with small_store(tmp_path / "s") as store:
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok
    with small_store(tmp_path / "s", host_cache="8MiB") as store:
        assert bind(store).prefetch(KEYS[:5]).wait(WAIT_S)
        monkeypatch.setattr(HostSide, "bring", full)
        result, forward, memory = load_layers(store)
        assert_loaded_is_true(result, KEYS, LAYOUT, memory)
        assert not forward.wrong
        assert [last for _, last, _ in forward.told] == [group.last for group in GROUPS]
        assert result.ok[5:].all()


def test_where_no_page_is_anywhere_the_forward_hears_of_all_layers(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", host_cache="8MiB") as store:
        result, forward, _ = load_layers(store, groups=None)
        assert not result.ok.any()
        assert forward.told[-1][1] == LAYOUT.layers
        assert not any(good for _, _, good in forward.told)

"""Layer-wise loads: each layer is there when it is told of, and in the end all is as after a plain load."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore import PageLayout
from gdsstore.errors import ArgumentError
from gdsstore.layout import ALIGNMENT
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.layered_cuts import block_ranges
from gdsstore.transfer.pipeline import LayerGate
from tests.store.helpers import (
    WAIT_S,
    make_keys,
    memory_directory,
    save,
    small_store,
    statuses,
    truth,
)
from tests.transfer.layered_rig import (
    COUNT,
    EVERYONE,
    GROUPS,
    KEYS,
    LAYOUT,
    LAYOUTS,
    Forward,
    Mask,
    PieceMemory,
    bind,
    cuts_of,
    groups_of,
    load_layers,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def stored(path: Path) -> Path:
    with small_store(path) as store:
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok
    return path


@settings(deadline=None)
@given(name=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_the_groups_read_every_block_once_and_all_that_their_layers_need(
    name: str, data: st.DataObject
) -> None:
    layout = LAYOUTS[name]
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    read = np.zeros(layout.record_bytes, np.int64)
    for group, ranges in zip(groups, block_ranges(layout, groups), strict=True):
        for offset, length in ranges:
            assert length > 0
            assert offset % ALIGNMENT == length % ALIGNMENT == 0
            read[offset : offset + length] += 1
        for offset, length in layout.slices(0, group.last):
            assert (read[offset : offset + length] == 1).all()
    assert (read == 1).all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    count=st.integers(1, 20),
    piece_cuts=st.lists(st.integers(1, 60_000), max_size=6),
    gap=st.sampled_from([0, 1, 16, 4096]),
    zero_copy=st.booleans(),
    staging=st.sampled_from(["64KiB", "4MiB"]),
    data=st.data(),
)
def test_every_layer_is_there_when_it_is_told_of_and_the_pages_are_those_of_a_plain_load(
    name: str, count: int, piece_cuts: list[int], gap: int, zero_copy: bool, staging: str, data: st.DataObject
) -> None:
    layout, keys = LAYOUTS[name], make_keys(count, name)
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    memory = PieceMemory(count, layout.page_bytes, piece_cuts, gap)
    chunk = {"chunk_bytes": "64KiB"} if staging == "64KiB" else {}
    with (
        memory_directory() as directory,
        small_store(directory / "s", zero_copy=zero_copy, staging_bytes=staging, **chunk) as store,
    ):
        assert save(bind(store, layout), keys, layout.page_bytes).all_ok
        result, forward, _ = load_layers(store, keys, layout, groups, memory)
        assert result.all_ok
        forward.check(groups, range(count))
        assert not forward.wrong
        plain = PieceMemory(count, layout.page_bytes, piece_cuts, gap)
        assert bind(store, layout).load(keys, plain.pieces()).result(WAIT_S).all_ok
        assert np.array_equal(memory.raw, plain.raw)  # and nothing between the pieces was touched


def test_planned_groups_hold_every_layer_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gdsstore.layered_plan.REQUEST_S", 1e-6
    )  # else groups of so few pages are not worth it
    layout = PageLayout.mha(layers=16, kv_heads=8, head_dim=128, page_tokens=16, dtype="bfloat16")
    keys = make_keys(4, "large")
    with small_store(path, segment_bytes="8MiB") as store:
        assert save(bind(store, layout), keys, layout.page_bytes).all_ok
        for compute_s in (None, 0.01):
            memory = PieceMemory(4, layout.page_bytes)
            forward = Forward(layout, keys, memory.pages)
            pages = bind(store, layout)
            future = pages.load_layers(
                keys, memory.pieces(), forward.on_layers, compute_s_per_layer=compute_s
            )
            assert future.result(WAIT_S).all_ok
            assert not forward.wrong
            assert len(forward.told) > 2
            forward.check([LayerGroup(first, last) for first, last, _ in forward.told], range(4))
            assert [0, *(last for _, last, _ in forward.told)] == [
                *(first for first, _, _ in forward.told),
                16,
            ]


def test_pages_without_layers_come_in_one_group(path: Path) -> None:
    for layout in (
        PageLayout.opaque(9000),
        PageLayout.mla(layers=3, latent_dim=64, page_tokens=16, dtype="bfloat16", order="token_layer"),
    ):
        with small_store(path) as store:
            assert save(bind(store, layout), KEYS, layout.page_bytes).all_ok
            result, forward, _ = load_layers(store, layout=layout, groups=None)
            assert result.all_ok
            assert not forward.wrong
            forward.check([LayerGroup(0, layout.layers)], EVERYONE)
            if layout.layers > 1:
                with pytest.raises(ArgumentError, match="layers"):
                    load_layers(store, layout=layout, groups=groups_of([1, 2]))


@pytest.mark.parametrize(
    "groups", [[], [LayerGroup(0, 5)], [LayerGroup(1, 6)], [LayerGroup(0, 2), LayerGroup(3, 6)]]
)
def test_groups_that_leave_layers_out_are_refused(stored: Path, groups: list[LayerGroup]) -> None:
    with small_store(stored) as store, pytest.raises(ArgumentError, match="order"):
        load_layers(store, groups=groups)


def test_absent_pages_are_good_in_no_layer_and_the_others_are_not_kept_waiting(stored: Path) -> None:
    keys = np.concatenate([make_keys(2, "nobody's"), KEYS])
    with small_store(stored) as store:
        result, forward, _ = load_layers(store, keys)
        assert statuses(result) == ["MISS_ABSENT"] * 2 + ["LOADED"] * COUNT
        forward.check(GROUPS, range(2, 2 + COUNT))
        result, forward, _ = load_layers(store, keys[:2])
        assert result.reasons() == {"MISS_ABSENT": 2}
        forward.check([LayerGroup(0, 6)], [])


def test_what_on_layers_raises_is_logged_and_the_load_goes_on(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def burst(first: int, last: int, ok: Mask) -> None:
        raise RuntimeError("the forward is gone")

    with small_store(stored) as store, caplog.at_level(logging.ERROR, "gdsstore"):
        memory = PieceMemory(COUNT, LAYOUT.page_bytes)
        assert bind(store).load_layers(KEYS, memory.pieces(), burst, groups=GROUPS).result(WAIT_S).all_ok
        assert (memory.pages() == truth(KEYS, LAYOUT.page_bytes)).all()
        assert "the forward is gone" in caplog.text


def test_a_forward_that_waits_at_the_gate_finds_each_layer(stored: Path) -> None:
    with small_store(stored) as store:
        memory, gate = PieceMemory(COUNT, LAYOUT.page_bytes), LayerGate(COUNT)
        future = bind(store).load_layers(KEYS, memory.pieces(), gate.open, groups=GROUPS)
        for layer in range(LAYOUT.layers):
            assert gate.wait(layer, WAIT_S).all()
            ((offset, length),) = LAYOUT.slices(layer, layer + 1)
            want = truth(KEYS, LAYOUT.page_bytes)[:, offset : offset + length]
            assert (memory.pages()[:, offset : offset + length] == want).all()
        assert future.result(WAIT_S).all_ok

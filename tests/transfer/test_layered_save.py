"""Layer-wise saves: what the forward has not computed is not written, and in the end all is as after a plain save."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore import PageLayout, PageStatus, SaveResult, Store
from gdsstore.catalog.keys import index_keys
from gdsstore.engines.base import Op, RangePlan, Transfer
from gdsstore.engines.faulty import FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import ArgumentError
from gdsstore.layered_plan import LayerPlan
from gdsstore.layout import ALIGNMENT
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.layered_cuts import PageCuts, block_ranges_of_save
from gdsstore.transfer.layered_rate import LoadRate
from gdsstore.transfer.pipeline import LayersComputed
from gdsstore.volume.format import Superblock
from gdsstore.volume.volume import Volume
from tests.store.helpers import WAIT_S, load, make_keys, memory_directory, save, small_store, statuses, truth
from tests.transfer.faults import fault, faulty, reaching
from tests.transfer.layered_rig import (
    COUNT,
    GROUPS,
    KEYS,
    LAYOUT,
    LAYOUTS,
    U8,
    PieceMemory,
    bind,
    cuts_of,
    groups_of,
)


class Computing(PieceMemory):
    """A forward's memory: layers of pages, computed one by one."""

    def __init__(self, layout: PageLayout, keys: U8, cuts: Sequence[int] = (), gap: int = 0) -> None:
        super().__init__(len(keys), layout.page_bytes, cuts, gap)
        self._layout, self._want = layout, truth(keys, layout.page_bytes)
        self.done = LayersComputed()

    def compute(self, first: int, last: int) -> None:
        """Write layers `first` to `last`, and tell of it."""
        for offset, length in self._layout.slices(first, last):
            for at, start, n in zip(
                self._start.tolist(),
                (np.cumsum(self.length) - self.length).tolist(),
                self.length.tolist(),
                strict=True,
            ):
                low, high = max(start, offset), min(start + n, offset + length)
                if low < high:
                    self.raw[:, at + low - start : at + high - start] = self._want[:, low:high]
        self.done.computed(last)

    def compute_all(self, pause_s: float = 0.0) -> None:
        for layer in range(self._layout.layers):
            time.sleep(pause_s)
            self.compute(layer, layer + 1)


def start(
    store: Store,
    memory: Computing,
    keys: U8 = KEYS,
    layout: PageLayout = LAYOUT,
    groups: list[LayerGroup] | None = GROUPS,
    deadline_s: float | None = None,
) -> Future[SaveResult]:
    return bind(store, layout).save_layers(
        keys, memory.pieces(), memory.done, groups=groups, deadline_s=deadline_s
    )


def assert_stored(store: Store, keys: U8, layout: PageLayout = LAYOUT) -> None:
    result, pages = load(bind(store, layout), keys, layout.page_bytes)
    assert result.all_ok
    assert (pages == truth(keys, layout.page_bytes)).all()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@settings(deadline=None)
@given(name=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_every_block_is_written_once_and_not_before_all_of_it_is_computed(
    name: str, data: st.DataObject
) -> None:
    layout = LAYOUTS[name]
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    written = np.zeros(layout.record_bytes, np.int64)
    for group, ranges in zip(groups, block_ranges_of_save(layout, groups), strict=True):
        for offset, length in ranges:
            assert length > 0
            assert offset % ALIGNMENT == length % ALIGNMENT == 0
            written[offset : offset + length] += 1
        for offset, length in layout.slices(group.last, layout.layers) if group.last < layout.layers else ():
            assert (written[offset : offset + length] == 0).all()
    assert (written == 1).all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    count=st.integers(1, 20),
    piece_cuts=st.lists(st.integers(1, 60_000), max_size=6),
    gap=st.sampled_from([0, 1, 16, 4096]),
    zero_copy=st.booleans(),
    early=st.booleans(),
    data=st.data(),
)
def test_pages_are_what_the_forward_computed(
    name: str,
    count: int,
    piece_cuts: list[int],
    gap: int,
    zero_copy: bool,
    early: bool,
    data: st.DataObject,
) -> None:
    layout, keys = LAYOUTS[name], make_keys(count)
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    memory = Computing(layout, keys, piece_cuts, gap)
    with (
        memory_directory() as directory,
        small_store(directory / "s", zero_copy=zero_copy, chunk_bytes="64KiB") as store,
    ):
        if early:
            memory.compute_all()
        future = start(store, memory, keys, layout, groups)
        if not early:
            assert not bind(store, layout).contains(keys).any()
            memory.compute_all(0.001)
        assert statuses(future.result(WAIT_S)) == ["SAVED"] * count
        assert_stored(store, keys, layout)


def test_pages_are_there_after_a_restart_and_a_rebuild(path: Path) -> None:
    memory = Computing(LAYOUT, KEYS)
    with small_store(path) as store:
        future = start(store, memory)
        memory.compute_all()
        assert future.result(WAIT_S).all_ok
    (path / "catalog" / "data.mdb").unlink()
    with small_store(path) as store:
        assert_stored(store, KEYS)


class Watched(FaultyEngine):
    """Remembers how many bytes it was told to write."""

    def __init__(self) -> None:
        super().__init__(PosixEngine(2), (), 0)
        self.written = 0

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        if op is Op.WRITE:
            self.written += int(plan.length.sum())
        return super().submit(op, plan)


def until(condition: object) -> None:
    end = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.001)
    assert condition()  # type: ignore[operator]


def test_groups_are_written_while_the_forward_goes_on(path: Path) -> None:
    own, memory = Watched(), Computing(LAYOUT, KEYS)
    sizes = [COUNT * sum(length for _, length in ranges) for ranges in block_ranges_of_save(LAYOUT, GROUPS)]
    with small_store(path, own_engine=own) as store:
        future = start(store, memory)
        for number, group in enumerate(GROUPS):
            assert own.written == sum(sizes[:number])
            memory.compute(group.first, group.last)
            until(lambda number=number: own.written == sum(sizes[: number + 1]))
            assert number == len(GROUPS) - 1 or not bind(store).contains(KEYS).any()
        assert future.result(WAIT_S).all_ok
        assert_stored(store, KEYS)


def test_layers_that_are_only_queued_are_waited_for(path: Path) -> None:
    own, memory = Watched(), Computing(LAYOUT, KEYS)
    over = threading.Event()
    memory.compute_all()
    queued, memory.done = memory.done, LayersComputed()
    for layer in range(LAYOUT.layers):
        memory.done.computed(layer + 1, over.is_set)
    assert queued.has(LayerGroup(0, LAYOUT.layers))
    with small_store(path, own_engine=own) as store:
        future = start(store, memory)
        time.sleep(0.1)
        assert own.written == 0
        over.set()
        assert future.result(WAIT_S).all_ok
        assert_stored(store, KEYS)


def test_an_event_that_fails_fails_the_save(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lost() -> bool:
        raise RuntimeError("the device is gone")

    memory = Computing(LAYOUT, KEYS)
    memory.done.computed(LAYOUT.layers, lost)
    with small_store(path) as store:
        assert statuses(start(store, memory).result(WAIT_S)) == ["FAILED_IO"] * COUNT
        assert "the device is gone" in caplog.text
        assert not bind(store).contains(KEYS).any()


def test_what_is_stored_already_is_not_written_again_and_a_key_that_comes_twice_once(path: Path) -> None:
    keys = np.concatenate([KEYS, KEYS[:2]])
    memory = Computing(LAYOUT, keys)
    with small_store(path) as store:
        assert save(bind(store), KEYS[:4], LAYOUT.page_bytes).all_ok
        future = start(store, memory, keys)
        memory.compute_all()
        assert statuses(future.result(WAIT_S)) == (
            ["ALREADY_THERE"] * 4 + ["SAVED"] * (COUNT - 4) + ["ALREADY_THERE"] * 2
        )
        assert_stored(store, KEYS)


def test_a_forward_that_never_ends_costs_the_deadline_and_nothing_else(path: Path) -> None:
    memory = Computing(LAYOUT, KEYS)
    with small_store(path) as store:
        future = start(store, memory, deadline_s=0.3)
        memory.compute(0, 3)
        result = future.result(WAIT_S)
        assert statuses(result) == ["FAILED_DEADLINE"] * COUNT
        assert not result.memory_in_use
        assert not bind(store).contains(KEYS).any()
        again = start(store, memory)
        memory.compute_all()
        assert again.result(WAIT_S).all_ok
        assert_stored(store, KEYS)


@pytest.mark.parametrize("ends", ["late", "broken"])
def test_a_forward_that_fails_takes_no_segment_out_of_use(path: Path, ends: str) -> None:
    def lost() -> bool:
        raise RuntimeError("the device is gone")

    with small_store(path) as store:
        for _ in range(8):
            memory = Computing(LAYOUT, KEYS)
            if ends == "broken":
                memory.done.computed(LAYOUT.layers, lost)
            assert not start(store, memory, deadline_s=0.05).result(WAIT_S).ok.any()
        states = store.stats()["segments"]
        assert states["sealed"] == 0
        assert states["open"] <= 2, "slots of a save that was given up are for the next ones"
        assert all(segment.outstanding == 0 for segment in store.pool._owned.values())


def test_pages_of_one_save_are_striped_over_the_volumes(tmp_path: Path) -> None:
    keys, layout = make_keys(40), LAYOUTS["blocks"]
    memory = Computing(layout, keys)
    memory.compute_all()
    with small_store([tmp_path / "s", tmp_path / "t"], chunk_bytes="256KiB") as store:
        assert start(store, memory, keys, layout, None).result(WAIT_S).all_ok
        index, tag = index_keys(keys, bind(store, layout).digest)
        where, rows = store.catalog.locate(index, tag)
        volumes = [rows[segment].volume for segment in where.segment.tolist()]
        assert min(volumes.count(0), volumes.count(1)) >= 10
        assert_stored(store, keys, layout)


def test_what_getting_a_segment_raises_fails_the_save(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(me: Volume, superblock: Superblock) -> None:
        raise RuntimeError("a bug")

    memory = Computing(LAYOUT, KEYS)
    memory.compute_all()
    with small_store(path) as store:
        monkeypatch.setattr(Volume, "create_segment", broken)
        assert statuses(start(store, memory).result(WAIT_S)) == ["FAILED_IO"] * COUNT
        monkeypatch.undo()
        assert start(store, memory).result(WAIT_S).all_ok


def test_slots_are_given_back_where_the_save_cannot_even_begin(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(me: PageCuts, memory: object) -> None:
        raise MemoryError

    memory = Computing(LAYOUT, KEYS)
    memory.compute_all()
    with small_store(path) as store:
        with monkeypatch.context() as context:
            context.setattr(PageCuts, "__init__", full)
            assert statuses(start(store, memory).result(WAIT_S)) == ["FAILED_IO"] * COUNT
        assert all(segment.outstanding == 0 for segment in store.pool._owned.values())
        assert start(store, memory).result(WAIT_S).all_ok


def test_a_cancel_ends_it_while_it_waits_for_the_forward(path: Path) -> None:
    own, memory = Watched(), Computing(LAYOUT, KEYS)
    with small_store(path, own_engine=own) as store:
        future = start(store, memory)
        memory.compute(0, 1)
        until(lambda: own.written > 0)
        future.cancel()
        result = future.result(WAIT_S)
        assert statuses(result) == ["FAILED_CANCELLED"] * COUNT
        states = store.stats()["segments"]
        assert states["sealed"] == 0, "the drive was not to blame"
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok


def test_a_store_without_room_says_so_for_what_does_not_fit(path: Path) -> None:
    count = 80
    keys, layout = make_keys(count), LAYOUTS["blocks"]
    memory = Computing(layout, keys)
    memory.compute_all()
    with small_store(path, capacity="10MiB", grace_s=3600) as store:
        result = start(store, memory, keys, layout, None).result(WAIT_S)
        assert 0 < int(result.ok.sum()) < count
        assert set(result.reasons()) == {"SAVED", "FAILED_NO_SPACE"}
        assert_stored(store, keys[result.ok], layout)


MIXES = [[kind] for kind in (FaultKind.ERRNO, FaultKind.SHORT, FaultKind.DELAY)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.sampled_from([*MIXES, [kind for (kind,) in MIXES]]),
    probability=st.sampled_from([0.02, 0.3]),
    zero_copy=st.booleans(),
    name=st.sampled_from(sorted(LAYOUTS)),
    data=st.data(),
)
def test_under_faults_what_is_saved_is_right_and_what_failed_is_absent(
    seed: int, kinds: list[FaultKind], probability: float, zero_copy: bool, name: str, data: st.DataObject
) -> None:
    layout, keys = LAYOUTS[name], make_keys(40, seed)
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    faults = [
        fault(kind, probability, op=Op.WRITE, **({"delay_s": 0.002} if kind is FaultKind.DELAY else {}))
        for kind in kinds
    ]
    memory = Computing(layout, keys)
    with (
        memory_directory() as directory,
        small_store(
            directory / "s", own_engine=faulty(*faults, seed=seed), zero_copy=zero_copy, chunk_bytes="64KiB"
        ) as store,
    ):
        future = start(store, memory, keys, layout, groups)
        memory.compute_all()
        result = future.result(WAIT_S)
        assert set(result.reasons()) <= {"SAVED", "FAILED_IO"}
        assert bind(store, layout).contains(keys).tolist() == result.ok.tolist()
        if result.ok.any():
            assert_stored(store, keys[result.ok], layout)


def test_a_drive_that_hangs_costs_the_deadline_and_its_slots_are_kept_until_it_ends(path: Path) -> None:
    own, memory = faulty(fault(FaultKind.HANG, op=Op.WRITE, limit=1)), Computing(LAYOUT, KEYS)
    memory.compute_all()
    with small_store(path, own_engine=own) as store:
        result = reaching(own, lambda: start(store, memory, deadline_s=0.3).result(WAIT_S))
        assert not bind(store).contains(KEYS).any()
        assert result.count(PageStatus.FAILED_DEADLINE) > 0
        assert result.memory_in_use
        held = [segment.outstanding for segment in store.pool._owned.values()]
        assert sum(held) > 0
        own.release_hangs()
        until(lambda: not result.memory_in_use)
        store.sweep()
        assert all(segment.outstanding == 0 for segment in store.pool._owned.values())


def test_groups_of_a_save_mirror_those_of_a_load() -> None:
    layout = PageLayout.mha(layers=32, kv_heads=8, head_dim=128, page_tokens=64, dtype="bfloat16")
    plan = LayerPlan(layout, LoadRate(), 512, 0.2, None, on_device=False)
    loads, saves = plan.groups(512), plan.groups_of_save(512)
    assert [group.layers for group in saves] == [group.layers for group in loads][::-1]
    assert saves[0].first == 0
    assert saves[-1].last == 32
    assert saves[-1].layers < saves[0].layers


@pytest.mark.parametrize("groups", [[(0, 2), (3, 6)], [(0, 7)], [(0, 3)]])
def test_groups_that_do_not_hold_every_layer_once_are_refused(
    path: Path, groups: list[tuple[int, int]]
) -> None:
    memory = Computing(LAYOUT, KEYS)
    with small_store(path) as store, pytest.raises(ArgumentError, match="every layer once"):
        start(store, memory, groups=[LayerGroup(*group) for group in groups])

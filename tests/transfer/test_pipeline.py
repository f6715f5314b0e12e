"""The layer-wise pipeline: in order, a bounded number ahead, and nobody left waiting for layers that do not come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError, EngineError
from gdsstore.transfer import pipeline
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.pipeline import LayerGate, LayerPipeline, LayersComputed, Mask
from gdsstore.waiting import Deadline

GROUPS = [LayerGroup(0, 1), LayerGroup(1, 4), LayerGroup(4, 8), LayerGroup(8, 9)]
PAGES = 4


class Transfer:
    """A group that ends when a test says so; `lost`: pages that do not come."""

    def __init__(self, group: LayerGroup, wanted: Mask, lost: set[int]) -> None:
        self.group, self.wanted = group, wanted
        self.lost = lost
        self.broken = False
        self.ended = threading.Event()
        self.cancelled = False

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout_s: float) -> Mask:
        if self.broken:
            raise EngineError("the engine is gone")
        assert self.ended.wait(timeout_s)
        came = self.wanted.copy()
        came[sorted(self.lost)] = False
        return came

    def cancel(self) -> None:
        self.cancelled = True


class Drive:
    """Starts transfers; `ends` says of which groups they end at once, and `steps` runs at each look of the pipeline."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.started: list[Transfer] = []
        self.lost: dict[int, set[int]] = {}  # by the group's first layer
        self.refuse: set[int] = set()
        self.at_once = True
        self.steps: list[Callable[[], None]] = []
        self.most = 0
        self.told: list[tuple[int, int, list[int]]] = []
        if monkeypatch is not None:
            monkeypatch.setattr(pipeline, "pause", self.step)

    def start(self, group: LayerGroup, wanted: Mask) -> Transfer:
        if group.first in self.refuse:
            raise EngineError("refused")
        transfer = Transfer(group, wanted, self.lost.get(group.first, set()))
        self.started.append(transfer)
        self.most = max(self.most, sum(not each.done for each in self.started))
        if self.at_once:
            transfer.ended.set()
        return transfer

    def on_layers(self, first: int, last: int, ok: Mask) -> None:
        self.told.append((first, last, np.flatnonzero(ok).tolist()))

    def step(self, seconds: float) -> None:
        assert self.steps, "the pipeline waits for what does not come"
        self.steps.pop(0)()

    def pipeline(self, **options: object) -> LayerPipeline:
        return LayerPipeline(GROUPS, PAGES, self.start, self.on_layers, **options)


def everything(pages: list[int]) -> list[tuple[int, int, list[int]]]:
    return [(group.first, group.last, pages) for group in GROUPS]


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    return Drive(monkeypatch)


def test_each_group_is_told_once_in_order(drive: Drive) -> None:
    result = drive.pipeline().run(Deadline(20))
    assert drive.told == everything([0, 1, 2, 3])
    assert result.ok.all()
    assert result.unfinished == ()


def test_groups_that_end_out_of_order_are_told_in_order_and_no_more_than_ahead_fly(drive: Drive) -> None:
    drive.at_once = False

    def end(number: int) -> Callable[[], None]:
        return lambda: drive.started[number].ended.set()

    drive.steps = [end(2), end(1), end(0), end(3)]
    told_before_first = []
    drive.steps.insert(2, lambda: told_before_first.append(list(drive.told)))
    result = drive.pipeline(ahead=3).run(Deadline(20))
    assert told_before_first == [[]]
    assert drive.told == everything([0, 1, 2, 3])
    assert result.ok.all()
    assert drive.most == 3


def test_a_page_that_fails_is_left_out_of_later_groups_and_the_others_go_on(drive: Drive) -> None:
    drive.lost = {1: {2}, 4: {0}}
    result = drive.pipeline(ahead=1).run(Deadline(20))
    assert drive.told == [(0, 1, [0, 1, 2, 3]), (1, 4, [0, 1, 3]), (4, 8, [1, 3]), (8, 9, [1, 3])]
    assert [transfer.wanted.sum() for transfer in drive.started] == [4, 4, 3, 2]
    assert result.ok.tolist() == [False, True, False, True]


def test_a_page_that_failed_is_not_good_in_a_group_that_was_started_before(drive: Drive) -> None:
    drive.lost = {0: {1}}
    drive.pipeline(ahead=4).run(Deadline(20))
    assert drive.told == everything([0, 2, 3])


def test_with_no_page_left_nothing_is_started_and_everybody_is_told(drive: Drive) -> None:
    drive.lost = {1: {0, 1, 2, 3}}
    result = drive.pipeline(ahead=1).run(Deadline(20))
    assert [transfer.group.first for transfer in drive.started] == [0, 1]
    assert [pages for _, _, pages in drive.told] == [[0, 1, 2, 3], [], [], []]
    assert not result.ok.any()


def test_a_group_that_cannot_start_fails_its_pages(drive: Drive) -> None:
    drive.refuse = {4}
    result = drive.pipeline(ahead=1).run(Deadline(20))
    assert [pages for _, _, pages in drive.told] == [[0, 1, 2, 3], [0, 1, 2, 3], [], []]
    assert not result.ok.any()


def test_a_group_without_a_result_fails_its_pages(drive: Drive) -> None:
    drive.at_once = False

    def end_all() -> None:
        for transfer in drive.started:
            transfer.ended.set()
            transfer.broken = transfer.group.first == 1

    drive.steps = [end_all, end_all]
    result = drive.pipeline().run(Deadline(20))
    assert [pages for _, _, pages in drive.told] == [[0, 1, 2, 3], [], [], []]
    assert not result.ok.any()


def test_the_deadline_ends_it_with_no_page_good_and_the_memory_named(drive: Drive) -> None:
    drive.at_once = False
    drive.steps = [lambda: drive.started[0].ended.set()]
    result = drive.pipeline().run(Deadline(0.0))
    assert drive.told == everything([])
    assert not result.ok.any()
    assert result.unfinished == ()
    later = Deadline(3600)

    def pass_by() -> None:
        later._end = 0.0

    drive.told.clear()
    drive.steps = [pass_by]
    result = drive.pipeline().run(later)
    assert drive.told == everything([])
    assert len(result.unfinished) == 2
    assert all(transfer.cancelled for transfer in drive.started)


def test_a_cancel_from_another_thread_ends_it() -> None:
    drive = Drive()
    drive.at_once = False
    one = drive.pipeline()
    thread = threading.Timer(0.02, one.cancel)
    thread.start()
    result = one.run(Deadline(20))
    thread.join()
    assert drive.told == everything([])
    assert len(result.unfinished) == 2


def test_what_a_callback_raises_comes_out_and_lets_go_of_what_flies(drive: Drive) -> None:
    def burst(first: int, last: int, ok: Mask) -> None:
        drive.at_once = False
        raise RuntimeError("the forward is gone")

    with pytest.raises(RuntimeError, match="gone"):
        LayerPipeline(GROUPS, PAGES, drive.start, burst, ahead=3).run(Deadline(20))
    assert [transfer.cancelled for transfer in drive.started] == [False, True, True]


def test_a_save_starts_a_group_when_it_is_computed(drive: Drive) -> None:
    started: list[int] = []

    class Computed(LayersComputed):
        def wait(self, group: LayerGroup, timeout_s: float) -> None:
            drive.step(timeout_s)

    computed = Computed()

    def compute(layers: int) -> Callable[[], None]:
        def step() -> None:
            started.append(len(drive.started))
            computed.computed(layers)

        return step

    drive.steps = [compute(1), compute(3), compute(9)]
    result = drive.pipeline(computed=computed).run(Deadline(20))
    assert started == [0, 1, 1]
    assert drive.told == everything([0, 1, 2, 3])
    assert result.ok.all()


def test_a_forward_waits_at_the_gate_for_its_layer() -> None:
    drive = Drive()
    drive.at_once = False
    drive.lost = {4: {3}}
    gate = LayerGate(PAGES)
    seen: list[list[int]] = []

    def forward() -> None:
        for layer in range(9):
            for transfer in drive.started:
                if transfer.group.first <= layer:
                    transfer.ended.set()
            seen.append(np.flatnonzero(gate.wait(layer, 20)).tolist())

    one = LayerPipeline(GROUPS, PAGES, drive.start, gate.open, ahead=4)
    runner = threading.Thread(target=one.run, args=(Deadline(20),))
    runner.start()
    while len(drive.started) < 4:
        pass
    forward()
    runner.join(20)
    assert seen == [[0, 1, 2, 3]] * 4 + [[0, 1, 2]] * 5


def test_a_layer_that_does_not_come_in_time_has_no_good_page() -> None:
    gate = LayerGate(2)
    gate.open(0, 2, np.ones(2, np.bool_))
    assert gate.wait(1, 0.0).all()
    assert not gate.wait(2, 0.0).any()


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    ahead=st.integers(1, 4),
    lost=st.dictionaries(st.integers(0, 7), st.sets(st.integers(0, 4)), max_size=4),
)
def test_the_pages_told_are_those_that_came_in_every_group_so_far(
    sizes: list[int], ahead: int, lost: dict[int, set[int]]
) -> None:
    ends = np.cumsum(sizes).tolist()
    groups = [LayerGroup(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    drive = Drive()
    drive.lost = {groups[number].first: pages for number, pages in lost.items() if number < len(groups)}
    result = LayerPipeline(groups, 5, drive.start, drive.on_layers, ahead=ahead).run(Deadline(20))
    gone: set[int] = set()
    expected = []
    for number, group in enumerate(groups):
        gone |= lost.get(number, set())
        expected.append((group.first, group.last, sorted(set(range(5)) - gone)))
    assert drive.told == expected
    assert np.flatnonzero(result.ok).tolist() == expected[-1][2]


@pytest.mark.parametrize(
    "groups",
    [
        [LayerGroup(1, 2)],
        [LayerGroup(0, 2), LayerGroup(1, 3)],
        [LayerGroup(0, 2), LayerGroup(3, 4)],
        [LayerGroup(0, 0)],
    ],
)
def test_groups_with_gaps_or_overlaps_are_refused(groups: list[LayerGroup]) -> None:
    drive = Drive()
    with pytest.raises(ArgumentError, match="order"):
        LayerPipeline(groups, PAGES, drive.start, drive.on_layers)
    with pytest.raises(ArgumentError, match="at least one"):
        LayerPipeline(GROUPS, PAGES, drive.start, drive.on_layers, ahead=0)


def test_a_step_that_is_over_counts_whatever_earlier_ones_wait_for() -> None:
    computed = LayersComputed()
    computed.computed(4, lambda: False)
    assert not computed.has(LayerGroup(0, 4))
    computed.computed(3)
    assert not computed.has(LayerGroup(0, 4))
    assert computed.has(LayerGroup(0, 3))
    computed.computed(6)  # as after a synchronization, or where the event was recorded again
    assert computed.has(LayerGroup(0, 4))
    assert computed.has(LayerGroup(4, 6))
    assert not computed.has(LayerGroup(4, 7))

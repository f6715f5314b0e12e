"""Which request of the transfer policy runs, and when one that waits ends."""

from __future__ import annotations

import math

import pytest

from gdsstore.errors import ArgumentError
from gdsstore.transfer.policy_stats import snapshot
from gdsstore.transfer.policy_terms import (
    Limits,
    State,
)
from tests.transfer.policy_desk import LOAD, MAINTENANCE, OFFLOAD, PREFETCH, Desk


def test_classes_go_in_their_order() -> None:
    desk = Desk(workers=1)
    waiting = [desk.submit(cls) for cls in (MAINTENANCE, OFFLOAD, PREFETCH, LOAD)]
    order = []
    while (request := desk.start()) is not None:
        order.append(request)
        desk.finish(request)
    assert order == waiting[::-1]


def test_within_a_class_the_first_that_came_goes_first() -> None:
    desk = Desk(workers=1)
    loads = [desk.submit(deadline=100 - i, nbytes=9 - i) for i in range(3)]
    for load in loads:
        assert desk.start() is load
        desk.finish(load)


def test_prefetch_goes_by_deadline_and_the_smaller_first_on_a_tie() -> None:
    desk = Desk(workers=1)
    late = desk.submit(PREFETCH, deadline=30)
    large = desk.submit(PREFETCH, deadline=20, nbytes=9)
    small = desk.submit(PREFETCH, deadline=20, nbytes=2)
    soon = desk.submit(PREFETCH, deadline=10, nbytes=99)
    for request in (soon, small, large, late):
        assert desk.start() is request
        desk.finish(request)


def test_a_prefetch_of_higher_priority_goes_before_an_earlier_deadline_and_takes_what_it_joins_along() -> (
    None
):
    desk = Desk(workers=1)
    blocker = desk.run()
    soon = desk.submit(PREFETCH, deadline=10)
    leader = desk.submit(PREFETCH, deadline=40, keys="ab")
    wanted = desk.submit(PREFETCH, deadline=30, priority=1)
    follower = desk.submit(PREFETCH, deadline=50, keys="ab", priority=2)
    assert follower.state is State.JOINED
    desk.finish(blocker)
    for request in (leader, wanted, soon):
        assert desk.start() is request
        desk.finish(request)


def test_a_class_that_waits_has_a_turn_after_so_many_starts_of_higher_ones() -> None:
    desk = Desk(workers=1, turn=5)
    offload = desk.submit(OFFLOAD)
    for number in range(6):
        desk.submit()
        request = desk.start()
        assert request is not None
        assert (request is offload) == (number == 5)
        desk.finish(request)


def test_a_prefetch_with_a_late_deadline_has_a_turn_too() -> None:
    desk = Desk(workers=1, turn=5)
    late = desk.submit(PREFETCH)
    for number in range(5):
        desk.submit(PREFETCH, deadline=1)
        request = desk.start()
        assert request is not None
        assert (request is late) == (number == 4)
        desk.finish(request)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_load_finds_a_worker_whatever_the_others_do(workers: int) -> None:
    desk = Desk(workers=workers)
    for _ in range(20):
        for cls in (MAINTENANCE, OFFLOAD, PREFETCH):
            desk.submit(cls)
    assert len(desk.starts()) == workers - 1
    load = desk.submit()
    assert desk.starts() == [load]


def test_offloads_leave_a_worker_to_prefetch() -> None:
    desk = Desk(workers=4)
    for _ in range(20):
        desk.submit(OFFLOAD)
    assert len(desk.starts()) == 2
    prefetches = [desk.submit(PREFETCH) for _ in range(3)]
    assert desk.starts() == prefetches[:1]


def test_a_full_queue_refuses_and_others_are_not_full() -> None:
    desk = Desk(workers=1, queued=3)
    desk.run()
    assert [desk.submit(OFFLOAD).state for _ in range(4)] == [State.QUEUED] * 3 + [State.REFUSED]
    assert desk.submit().state is State.QUEUED
    assert snapshot(desk.policy, 0.0).classes["offload"].refused == 1


def test_what_waits_past_its_deadline_expires_and_is_not_started() -> None:
    desk = Desk(workers=1)
    running = desk.run(deadline=1)
    waiting = desk.submit(deadline=2)
    assert 0 < desk.policy.next_event() <= 2
    desk.now = 2.0
    desk.finish(running)
    assert desk.start() is None
    assert waiting.state is State.EXPIRED
    assert desk.policy.ended == [waiting]
    assert running.state is State.DONE  # one that runs has a deadline of its own to keep
    assert desk.policy.next_event() == math.inf


def test_a_deadline_that_has_passed_expires_at_once() -> None:
    desk = Desk()
    assert desk.submit(deadline=0.0).state is State.EXPIRED
    assert desk.start() is None


def test_offloads_older_than_their_budget_are_dropped_and_counted() -> None:
    desk = Desk(workers=1, offload_budget_s=5)
    desk.run()
    old = desk.submit(OFFLOAD)
    desk.now = 3.0
    young, prefetch = desk.submit(OFFLOAD), desk.submit(PREFETCH)
    desk.now = 5.0
    desk.policy.expire(desk.now)
    assert (old.state, young.state, prefetch.state) == (State.DROPPED, State.QUEUED, State.QUEUED)
    stats = snapshot(desk.policy, desk.now).classes["offload"]
    assert (stats.dropped, stats.waiting, stats.oldest_s) == (1, 1, 2.0)


@pytest.mark.parametrize("limits", [{"workers": 0}, {"queued": 0}, {"turn": 0}, {"offload_budget_s": 0}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        Limits(**limits)

"""One flight a key: who joins, who waits, who takes over."""

from __future__ import annotations

import pytest

from gdsstore.transfer.policy_terms import (
    AskState,
    Caps,
    State,
)
from tests.transfer.policy_desk import LOAD, MAINTENANCE, OFFLOAD, PREFETCH, Desk


def test_a_second_load_joins_the_first_and_shares_its_outcome() -> None:
    desk = Desk()
    first, second, third = desk.submit(keys="abc"), desk.submit(keys="ab"), desk.submit(keys="c")
    assert desk.starts() == [first]
    assert second.state is third.state is State.JOINED
    assert second.leader is first
    desk.finish(first)
    assert second.state is third.state is State.DONE
    assert desk.policy.ended == [second, third]
    assert desk.policy.idle


def test_after_the_flight_the_key_can_fly_again() -> None:
    desk = Desk()
    first = desk.submit(keys="a")
    desk.starts()
    desk.finish(first)
    again = desk.submit(keys="a")
    assert desk.starts() == [again]


def test_keys_that_are_under_way_in_part_are_waited_for() -> None:
    desk = Desk()
    first, second, third = desk.submit(keys="ab"), desk.submit(keys="bc"), desk.submit(keys="cd")
    assert desk.starts() == [first]
    desk.finish(first)
    assert desk.starts() == [second]
    desk.finish(second)
    assert desk.starts() == [third]


def test_a_load_does_not_wait_for_an_offload_of_the_same_key() -> None:
    desk = Desk()
    offload, load = desk.submit(OFFLOAD, keys="a"), desk.submit(keys="a")
    assert set(desk.starts()) == {offload, load}


def test_a_load_upgrades_the_queued_prefetch_that_it_joins() -> None:
    desk = Desk(workers=1)
    running = desk.run()
    prefetch = desk.submit(PREFETCH, keys="a")
    other = desk.submit()
    load = desk.submit(keys="a")
    assert load.state is State.JOINED
    desk.finish(running)
    assert prefetch.cls is LOAD
    assert desk.start() is other
    desk.finish(other)
    desk.submit(PREFETCH, deadline=1)
    assert desk.start() is prefetch
    desk.finish(prefetch)
    assert load.state is State.DONE


def test_a_load_upgrades_whatever_its_keys_wait_for() -> None:
    desk = Desk(workers=1)
    running = desk.run()
    first, second = desk.submit(PREFETCH, keys="ab"), desk.submit(PREFETCH, keys="bc")
    desk.submit(keys="cd")
    assert first.cls is second.cls is LOAD
    joined = desk.submit(MAINTENANCE, keys="xy")
    desk.submit(PREFETCH, keys="x")
    assert joined.cls is PREFETCH
    desk.finish(running)
    assert desk.start() is first


def test_a_load_that_joins_upgrades_what_the_flight_waits_for() -> None:
    desk = Desk(workers=1)
    desk.run()
    first, second = desk.submit(PREFETCH, keys="ab"), desk.submit(PREFETCH, keys="bc")
    assert desk.submit(keys="c").leader is second
    assert first.cls is second.cls is LOAD


def test_an_upgraded_prefetch_is_not_held_to_what_it_moved_before() -> None:
    desk = Desk(Caps(1, 1), volumes=1)
    prefetch = desk.submit(PREFETCH, keys="a")
    desk.starts()
    for _ in range(50):
        desk.done(desk.ask(prefetch, 1))
    under_way = desk.ask(prefetch, 1)
    load = desk.run()
    desk.submit(keys="a")
    first, second = desk.ask(load, 1), desk.ask(prefetch, 1)
    third = desk.ask(load, 1)
    assert desk.done(under_way) == [first]
    assert desk.done(first) == [second]
    assert desk.done(second) == [third]


def test_an_upgraded_prefetch_that_runs_asks_as_a_load() -> None:
    desk = Desk(volumes=1)
    prefetch = desk.submit(PREFETCH, keys="a")
    desk.starts()
    hog = desk.ask(desk.run(), 10)
    first, second = desk.run(PREFETCH, deadline=1), prefetch
    waits = desk.ask(first, 10)
    desk.submit(keys="a")
    upgraded = desk.ask(second, 10)
    assert waits.state is AskState.WAITING
    assert desk.done(hog) == [upgraded]


def test_a_prefetch_joined_by_a_more_urgent_one_goes_by_its_deadline() -> None:
    desk = Desk(workers=1)
    running = desk.run()
    joined = desk.submit(PREFETCH, keys="a", deadline=90)
    desk.submit(PREFETCH, deadline=50)
    desk.submit(PREFETCH, keys="a", deadline=10)
    desk.finish(running)
    assert desk.start() is joined


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_who_joined_takes_the_place_of_one_that_ended_without_being_done(how: str) -> None:
    desk = Desk(workers=1)
    running = desk.run()
    first, second, third = desk.submit(keys="ab", deadline=5), desk.submit(keys="a"), desk.submit(keys="a")
    if how == "cancelled":
        desk.policy.cancel(first, desk.now)
    else:
        desk.now = 5.0
        desk.policy.expire(desk.now)
    assert first.state == how
    assert (second.state, third.state) == (State.QUEUED, State.JOINED)
    assert third.leader is second
    desk.finish(running)
    assert desk.start() is second


def test_cancelling_one_that_joined_leaves_the_flight_alone() -> None:
    desk = Desk()
    first, second = desk.submit(keys="a"), desk.submit(keys="a")
    desk.starts()
    desk.policy.cancel(second, desk.now)
    assert (first.state, second.state) == (State.RUNNING, State.CANCELLED)
    assert not first.stop
    desk.finish(first)
    assert second.state is State.CANCELLED


def test_nobody_joins_a_flight_that_shall_stop() -> None:
    desk = Desk()
    first = desk.submit(keys="a")
    desk.starts()
    desk.policy.cancel(first, desk.now)
    second = desk.submit(keys="a")
    assert (second.state, desk.starts()) == (State.QUEUED, [])
    desk.finish(first)
    assert first.state is State.CANCELLED
    assert desk.starts() == [second]

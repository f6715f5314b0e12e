"""Which chunk goes to the engine: caps, order, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from gdsstore.errors import ArgumentError
from gdsstore.transfer.policy_stats import snapshot
from gdsstore.transfer.policy_terms import (
    AskState,
    Caps,
)
from gdsstore.transfer.policy_volumes import STILL_S
from tests.transfer.policy_desk import MAINTENANCE, OFFLOAD, PREFETCH, WRITE, Desk


def test_caps_hold_in_bytes_and_in_operations() -> None:
    desk = Desk()
    load = desk.run()
    assert desk.ask(load, 6).state is AskState.GRANTED
    assert desk.ask(load, 5).state is AskState.WAITING
    assert desk.ask(load, 6, 1, ops=3).state is AskState.GRANTED
    assert desk.ask(load, 1, 1, ops=2).state is AskState.WAITING


def test_a_chunk_larger_than_the_caps_goes_alone() -> None:
    desk = Desk()
    load = desk.run()
    small = desk.ask(load, 1)
    large = desk.ask(load, 99, ops=50)
    assert large.state is AskState.WAITING
    assert desk.done(small) == [large]
    after = desk.ask(load, 1)
    assert after.state is AskState.WAITING
    assert desk.done(large) == [after]


def test_reads_go_before_writes_of_the_same_class() -> None:
    desk = Desk(volumes=1, workers=8)
    hog = desk.ask(desk.run(), 10)
    write = desk.ask(desk.run(MAINTENANCE, op=WRITE), 10)
    read = desk.ask(desk.run(MAINTENANCE), 10)
    assert desk.done(hog) == [read]
    assert desk.done(read) == [write]


def test_no_write_goes_where_a_read_waits_though_there_is_room_for_it() -> None:
    desk = Desk()
    load, offload = desk.run(), desk.run(OFFLOAD)
    hog = desk.ask(load, 10, 1)
    read = desk.ask(load, 5, 0, 1)  # waits for volume 1
    assert read.state is AskState.WAITING
    write = desk.ask(offload, 1, 0)
    assert write.state is AskState.WAITING
    assert desk.ask(load, 1, 0).state is AskState.GRANTED  # another read may
    assert desk.done(hog) == [read, write]


def test_a_write_that_reads_overtook_often_enough_goes_first() -> None:
    desk = Desk(volumes=1, turn=3)
    load, offload = desk.run(), desk.run(OFFLOAD)
    under_way = desk.ask(load, 10)
    write = desk.ask(offload, 10)
    for number in range(4):
        read = desk.ask(load, 10)
        granted = desk.done(under_way)
        assert granted == [read if number < 3 else write]
        under_way = read


def test_writes_that_wait_together_have_one_turn_together() -> None:
    desk = Desk(volumes=1, turn=4)
    load, offloads = desk.run(), [desk.run(OFFLOAD) for _ in range(2)]
    under_way = desk.ask(load, 10)
    writes = {desk.ask(offload, 10): offload for offload in offloads}
    order = ""
    for _ in range(30):
        read = desk.ask(load, 10)
        (under_way,) = desk.done(under_way)
        if under_way in writes:
            order += "w"
            writes[desk.ask(writes.pop(under_way), 10)] = offloads[0]
            desk.done(read)
        else:
            order += "r"
    assert order.startswith("rrrrwrrrrwrrrrw")


def test_the_turn_of_a_later_chunk_takes_nothing_from_an_earlier_one() -> None:
    desk = Desk(volumes=3, workers=8, turn=2)
    load = desk.run()
    desk.ask(load, 5, 1)
    hog = desk.ask(load, 5, 2)
    earlier, later = desk.ask(desk.run(OFFLOAD), 6, 0, 1), desk.ask(desk.run(OFFLOAD), 6, 0, 2)
    for volume in (1, 2, 2):
        assert desk.ask(load, 1, volume).state is AskState.GRANTED
    assert desk.done(hog) == [later]
    assert desk.ask(load, 1, 1).state is AskState.GRANTED
    assert earlier.urgent


def test_who_waits_behind_earlier_chunks_was_not_overtaken() -> None:
    desk = Desk(Caps(1, 1), volumes=1, workers=8, turn=2)
    under_way = desk.ask(desk.run(), 1)
    asks = {at: desk.ask(desk.run(PREFETCH, deadline=at), 1) for at in (1, 2, 90, 50)}
    for at in (1, 2, 50, 90):
        assert desk.done(under_way) == [asks[at]]
        under_way = asks[at]


def test_a_small_chunk_does_not_overtake_a_large_one_that_waits_where_it_wants_to_go() -> None:
    desk = Desk()
    load = desk.run()
    hog = desk.ask(load, 5)
    large, small = desk.ask(load, 9), desk.ask(load, 1)
    assert small.state is AskState.WAITING
    assert desk.ask(load, 1, 1).state is AskState.GRANTED  # elsewhere it may
    assert desk.done(hog) == [large, small]


def test_a_chunk_on_two_volumes_gets_both_in_the_end() -> None:
    desk = Desk(turn=3)
    load = desk.run()
    under_way = [desk.ask(load, 6, 0), desk.ask(load, 6, 1)]
    both = desk.ask(load, 6, 0, 1)
    for number in range(40):
        volume = number % 2
        under_way.append(desk.ask(load, 4, volume))
        for ask in under_way[:]:
            if volume in ask.units and ask.state is AskState.GRANTED:
                under_way.remove(ask)
                desk.done(ask)
                break
        if both.state is AskState.GRANTED:
            break
    assert both.state is AskState.GRANTED


def test_a_volume_that_stands_still_does_not_hold_up_the_others() -> None:
    desk = Desk(turn=1)
    load = desk.run()
    desk.ask(load, 10, 1)  # never ends
    both = desk.ask(load, 5, 0, 1)
    desk.done(desk.ask(load, 1, 0))
    assert both.urgent
    held = desk.ask(load, 1, 0)
    assert held.state is AskState.WAITING
    desk.done(held)
    desk.now += STILL_S * 1.1
    assert desk.ask(load, 1, 0).state is AskState.GRANTED
    assert desk.ask(desk.run(OFFLOAD), 1, 0).state is AskState.GRANTED
    assert both.state is AskState.WAITING


def test_requests_of_a_class_get_equal_shares() -> None:
    desk = Desk(Caps(1, 1), volumes=1, workers=4)
    hog = desk.ask(desk.run(), 1)
    loads = [desk.run() for _ in range(3)]
    sizes = [1, 4, 2]
    got = [0, 0, 0]
    waiting = {desk.ask(load, size): i for i, (load, size) in enumerate(zip(loads, sizes, strict=True))}
    under_way = hog
    for _ in range(280):
        (under_way,) = desk.done(under_way)
        who = waiting.pop(under_way)
        got[who] += sizes[who]
        waiting[desk.ask(loads[who], sizes[who])] = who
    assert max(got) - min(got) <= 2 * max(sizes)


def test_a_new_request_neither_starves_an_old_one_nor_waits_until_it_caught_up() -> None:
    desk = Desk(Caps(1, 1), volumes=1)
    old = desk.run()
    for _ in range(50):
        desk.done(desk.ask(old, 1))
    under_way, new = desk.ask(old, 1), desk.run()
    order = []
    asks = {desk.ask(old, 1): old, desk.ask(new, 1): new}
    for _ in range(10):
        (under_way,) = desk.done(under_way)
        who = asks.pop(under_way)
        order.append(who)
        asks[desk.ask(who, 1)] = who
    assert order.count(old) == order.count(new) == 5


def test_prefetch_chunks_go_by_deadline_then_by_size_of_their_request() -> None:
    desk = Desk(Caps(1, 1), volumes=1, workers=8)
    hog = desk.ask(desk.run(), 1)
    late = desk.ask(desk.run(PREFETCH, deadline=90), 1)
    large = desk.ask(desk.run(PREFETCH, deadline=50, nbytes=9), 1)
    small = desk.ask(desk.run(PREFETCH, deadline=50, nbytes=5), 1)
    load = desk.ask(desk.run(), 1)
    under_way = hog
    for expected in (load, small, large, late):
        (under_way,) = desk.done(under_way)
        assert under_way is expected


def test_late_chunks_count_until_the_engine_lets_go_but_one_may_still_go() -> None:
    desk = Desk(volumes=1)
    load = desk.run()
    stuck = desk.ask(load, 8)
    desk.policy.late(stuck, desk.now)
    probe = desk.ask(load, 5)
    assert probe.state is AskState.GRANTED  # alone
    more = desk.ask(load, 1)
    assert more.state is AskState.WAITING
    desk.finish(load)
    assert (probe.state, stuck.state) == (AskState.ENDED, AskState.LATE)
    assert not desk.policy.idle
    desk.done(stuck)
    assert desk.policy.idle


def test_cancelling_a_request_ends_its_asks_and_refuses_new_ones() -> None:
    desk = Desk(volumes=1)
    load, other = desk.run(), desk.run()
    held = desk.ask(load, 10)
    waits, behind = desk.ask(load, 10), desk.ask(other, 1)
    desk.policy.cancel(load, desk.now)
    assert waits.state is AskState.ENDED
    assert waits in desk.policy.decided
    assert desk.ask(load, 1).state is AskState.ENDED
    assert held.state is AskState.GRANTED  # the engine has it
    assert desk.done(held) == [behind]


def test_what_a_request_did_not_give_back_is_given_back_when_it_ends() -> None:
    desk = Desk(volumes=1)
    load = desk.run()
    desk.ask(load, 10)
    behind = desk.ask(desk.run(), 10)
    desk.finish(load)
    assert behind.state is AskState.GRANTED


def test_new_caps_count_at_once() -> None:
    desk = Desk(volumes=1)
    load = desk.run()
    first, second = desk.ask(load, 10), desk.ask(load, 10)
    desk.policy.set_caps(0, Caps(20, 4), desk.now)
    assert second.state is AskState.GRANTED
    desk.policy.set_caps(0, Caps(15, 4), desk.now)
    third = desk.ask(load, 10)
    desk.done(first)
    assert third.state is AskState.WAITING
    assert desk.done(second) == [third]


def test_volumes_that_are_not_there_are_refused_and_nothing_is_left() -> None:
    desk = Desk(volumes=2)
    load = desk.run()
    for volume in (2, -1):
        with pytest.raises(ArgumentError):
            desk.ask(load, 1, volume)
    desk.finish(load)
    assert desk.policy.idle


def test_stats_tell_what_is_under_way_and_what_was_granted() -> None:
    desk = Desk(Caps(100, 10))
    load, offload = desk.run(), desk.run(OFFLOAD)
    desk.done(desk.ask(load, 7, 0, 1, ops=2))
    desk.ask(load, 5, 0)
    desk.policy.late(desk.ask(offload, 3, 1), desk.now)
    stats = snapshot(desk.policy, desk.now)
    first, second = stats.volumes
    assert (first.in_flight_bytes, first.in_flight_ops, first.late_bytes) == (5, 1, 0)
    assert (first.read_bytes, first.read_ops, first.write_bytes) == (12, 3, 0)
    assert (second.in_flight_bytes, second.late_bytes, second.late_ops, second.write_bytes) == (0, 3, 1, 3)
    assert stats.classes["load"].running == stats.classes["offload"].started == 1

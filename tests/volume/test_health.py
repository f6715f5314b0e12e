"""A sick volume is left alone and comes back by itself; a slow one gets no saves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.volume.health import Breaker, HealthLimits, VolumeHealth, watch_volumes

MIB = 1 << 20
LIMITS = HealthLimits()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def volume(clock: Clock) -> VolumeHealth:
    return watch_volumes(1, LIMITS, clock)[0]


def move(volume: VolumeHealth, count: int = 1, *, ok: bool = True, timed_out: bool = False) -> None:
    for _ in range(count):
        volume.record(ok=ok, nbytes=MIB, seconds=0.0, timed_out=timed_out)


def sicken(volume: VolumeHealth) -> None:
    move(volume, LIMITS.timeouts_in_a_row, ok=False, timed_out=True)
    assert volume.breaker is Breaker.OPEN


def test_many_errors_open_the_breaker(volume: VolumeHealth) -> None:
    move(volume, LIMITS.least - 1, ok=False)
    assert volume.allows(write=True)  # too few to say
    move(volume, ok=False)
    assert volume.breaker is Breaker.OPEN
    assert not volume.allows(write=False)
    assert not volume.allows(write=True)


def test_single_errors_among_many_transfers_do_not(volume: VolumeHealth, clock: Clock) -> None:
    for _ in range(200):
        move(volume, 3)
        move(volume, ok=False)
        clock.now += 0.1
    assert volume.breaker is Breaker.CLOSED
    assert volume.snapshot().error_share == pytest.approx(0.25, abs=0.02)


def test_errors_of_long_ago_do_not_count(volume: VolumeHealth, clock: Clock) -> None:
    for _ in range(20):
        move(volume, ok=False)
        clock.now += LIMITS.window_s / 4
    assert volume.breaker is Breaker.CLOSED


def test_timeouts_in_a_row_open_it_and_answers_in_between_do_not(volume: VolumeHealth) -> None:
    for _ in range(10):
        move(volume, LIMITS.timeouts_in_a_row - 1, ok=False, timed_out=True)
        move(volume, 5)
    assert volume.breaker is Breaker.CLOSED
    sicken(volume)


def test_it_comes_back_by_itself_after_probes_one_at_a_time(volume: VolumeHealth, clock: Clock) -> None:
    sicken(volume)
    clock.now += LIMITS.first_retry_s
    for left in reversed(range(LIMITS.probes)):
        assert volume.allows(write=False)
        assert volume.breaker is Breaker.HALF_OPEN
        assert not volume.allows(write=False)
        assert not volume.allows(write=True)
        move(volume)
        assert volume.healthy == (left == 0)
    assert volume.allows(write=True)
    assert volume.allows(write=True)


def test_each_probe_that_fails_doubles_the_wait_up_to_the_longest(volume: VolumeHealth, clock: Clock) -> None:
    sicken(volume)
    waits = []
    for _ in range(10):
        waits.append(volume.snapshot().retry_in_s)
        clock.now += waits[-1] * 0.99
        assert not volume.allows(write=False)
        clock.now += waits[-1] * 0.011
        assert volume.allows(write=False)
        move(volume, ok=False)
        assert volume.breaker is Breaker.OPEN
    assert waits[:4] == pytest.approx([1, 2, 4, 8])
    assert waits[-1] == LIMITS.longest_retry_s


def test_a_volume_that_flaps_waits_longer_and_one_that_was_well_for_long_does_not(
    volume: VolumeHealth, clock: Clock
) -> None:
    sicken(volume)
    recover(volume, clock)
    sicken(volume)
    assert volume.snapshot().retry_in_s == pytest.approx(2 * LIMITS.first_retry_s)
    recover(volume, clock)
    clock.now += LIMITS.longest_retry_s + 1
    sicken(volume)
    assert volume.snapshot().retry_in_s == pytest.approx(LIMITS.first_retry_s)


def recover(volume: VolumeHealth, clock: Clock) -> None:
    clock.now += volume.snapshot().retry_in_s
    for _ in range(LIMITS.probes):
        assert volume.allows(write=False)
        move(volume)
    assert volume.breaker is Breaker.CLOSED


def test_a_volume_that_came_back_begins_anew(volume: VolumeHealth, clock: Clock) -> None:
    move(volume, LIMITS.least, ok=False)
    assert volume.breaker is Breaker.OPEN
    move(volume, LIMITS.timeouts_in_a_row, ok=False, timed_out=True)  # begun before, and seen late
    recover(volume, clock)
    move(volume, ok=False, timed_out=True)
    assert volume.breaker is Breaker.CLOSED


def test_a_probe_that_nobody_speaks_of_any_more_is_given_up(volume: VolumeHealth, clock: Clock) -> None:
    sicken(volume)
    clock.now += LIMITS.first_retry_s
    assert volume.allows(write=False)
    clock.now += LIMITS.probe_s - 0.1
    assert not volume.allows(write=False)
    clock.now += 0.2
    assert volume.allows(write=False)


def test_what_began_before_the_probe_is_not_taken_for_it(volume: VolumeHealth, clock: Clock) -> None:
    sicken(volume)
    clock.now += LIMITS.first_retry_s
    assert volume.allows(write=False)
    clock.now += 0.5
    for _ in range(LIMITS.probes):
        volume.record(ok=True, nbytes=MIB, seconds=20.0)
        volume.record(ok=False, nbytes=MIB, seconds=20.0, timed_out=True)
    assert volume.breaker is Breaker.HALF_OPEN
    assert not volume.allows(write=False)  # the probe is still under way
    volume.record(ok=True, nbytes=MIB, seconds=0.5)
    assert volume.allows(write=False)


def run(
    volumes: list[VolumeHealth], clock: Clock, seconds_a_mib: list[float], for_s: float, nbytes: int = MIB
) -> None:
    for _ in range(int(for_s * 4)):
        for volume, each in zip(volumes, seconds_a_mib, strict=True):
            for _ in range(4):
                volume.record(ok=True, nbytes=nbytes, seconds=each * (1 + nbytes / MIB))
        clock.now += 0.25


def test_saves_avoid_a_volume_that_became_much_slower_than_the_others(clock: Clock) -> None:
    volumes = watch_volumes(3, LIMITS, clock)
    run(volumes, clock, [0.001] * 3, 60)
    assert not any(volume.slow for volume in volumes)
    run(volumes, clock, [0.001, 0.02, 0.001], LIMITS.slow_after_s / 2)
    assert not volumes[1].slow  # a while is nothing
    run(volumes, clock, [0.001, 0.02, 0.001], 2 * LIMITS.slow_after_s)
    assert [volume.slow for volume in volumes] == [False, True, False]
    assert not volumes[1].allows(write=True)
    assert not volumes[1].healthy
    assert volumes[1].allows(write=False)
    run(volumes, clock, [0.001] * 3, 2 * LIMITS.window_s)
    assert volumes[1].allows(write=True)


def test_a_slow_volume_that_nobody_uses_is_tried_again(clock: Clock) -> None:
    volumes = watch_volumes(2, LIMITS, clock)
    run(volumes, clock, [0.001] * 2, 60)
    run(volumes, clock, [0.001, 0.02], 3 * LIMITS.slow_after_s)
    assert not volumes[1].allows(write=True)
    clock.now += LIMITS.slow_for_s
    assert volumes[1].allows(write=True)
    run(volumes, clock, [0.001, 0.02], LIMITS.slow_after_s / 2)
    assert volumes[1].allows(write=True)  # it has to look slow for some time again


@pytest.mark.parametrize("count", [1, 2, 4])
def test_when_all_get_slower_none_is_slow(clock: Clock, count: int) -> None:
    volumes = watch_volumes(count, LIMITS, clock)
    run(volumes, clock, [0.001] * count, 60)
    run(volumes, clock, [0.05] * count, 60)
    assert all(volume.allows(write=True) for volume in volumes)


def test_one_that_was_always_slower_is_not_slow(clock: Clock) -> None:
    volumes = watch_volumes(2, LIMITS, clock)
    run(volumes, clock, [0.001, 0.01], 120)
    assert all(volume.healthy for volume in volumes)


def test_smaller_transfers_are_not_slower_ones(clock: Clock) -> None:
    volumes = watch_volumes(2, LIMITS, clock)
    run(volumes, clock, [0.001] * 2, 60, nbytes=32 * MIB)
    for _ in range(200):
        run([volumes[0]], clock, [0.001], 0.25, nbytes=32 * MIB)
        run([volumes[1]], clock, [0.001], 0.25, nbytes=MIB // 4)
        assert all(volume.healthy for volume in volumes)


def test_what_is_usual_follows_the_load(clock: Clock) -> None:
    volumes = watch_volumes(2, LIMITS, clock)
    run(volumes, clock, [0.001] * 2, 60)
    run(volumes, clock, [0.005] * 2, 600)
    run(volumes, clock, [0.005, 0.017], 60)
    assert not volumes[1].slow


@settings(max_examples=200)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ok", "fail", "hang", "ask", "wait"]), st.floats(0, 20)), max_size=60
    )
)
def test_whatever_happened_a_volume_that_works_again_is_used_again(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    volume = watch_volumes(2, LIMITS, clock)[0]
    for what, seconds in steps:
        if what == "wait":
            clock.now += seconds
        elif what == "ask":
            volume.allows(write=seconds > 10)
        else:
            volume.record(ok=what == "ok", nbytes=MIB, seconds=seconds, timed_out=what == "hang")
        snapshot = volume.snapshot()
        assert 0 <= snapshot.retry_in_s <= LIMITS.longest_retry_s
        assert snapshot.errors <= snapshot.transfers
    end = clock.now + LIMITS.longest_retry_s + (LIMITS.probes + 1) * LIMITS.probe_s
    while clock.now < end and volume.breaker is not Breaker.CLOSED:
        if volume.allows(write=False):
            clock.now += 0.01
            volume.record(ok=True, nbytes=MIB, seconds=0.01)
        clock.now += 1
    assert volume.healthy

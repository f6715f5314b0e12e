"""What may be under way on a volume becomes what its drive needs: on a simulated drive, through the policy, on a virtual clock."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.engines.base import Op
from gdsstore.transfer.caps import CapMeter, LearnedCaps
from gdsstore.transfer.caps_search import LEAST_CHUNKS, MOST, ORDER, REST, STEP, CapSearch
from gdsstore.transfer.policy import TransferPolicy
from gdsstore.transfer.policy_terms import Caps, Cost, Limits, TransferClass
from tests.transfer.simulated_drive import CHUNKS, NEVER, Calls, Drive, KiB, MiB

READ, WRITE = Op.READ, Op.WRITE
CHUNK = 256 * KiB
CEILING = MOST * CHUNKS


def learned(chunk_bytes: int = CHUNK, *, well: bool = True) -> LearnedCaps:
    return LearnedCaps(1, chunk_bytes, CHUNKS, lambda volume, op: well)


def fixed_rate(drive: Drive, chunk_bytes: int, chunks: int) -> float:
    calls = Calls(replace(drive), chunk_bytes, cap_chunks=chunks)
    calls.run(300)
    return calls.run(800)


def two_steps_below(chunks: int) -> int:
    for _ in range(2):
        chunks = max(min(math.ceil(chunks / STEP), chunks - 1), LEAST_CHUNKS)
    return chunks


DRIVES = {
    # bytes/s, seconds, chunk, chunks that end until it is found
    "NVMe of 14 GB/s": (Drive(14e9, 100e-6, 8, CHUNK), CHUNK, 40_000),
    "NVMe of 7 GB/s": (Drive(7e9, 100e-6, 8, CHUNK), CHUNK, 25_000),
    "NVMe of 7 GB/s with chunks of 32 MiB": (Drive(7e9, 100e-6, 8, 4 * MiB), 32 * MiB, 8_000),
    "SATA": (Drive(0.5e9, 100e-6, 8), CHUNK, 8_000),
    "a block device on the network": (Drive(1e9, 5e-3, 8, CHUNK), CHUNK, 25_000),
    "throttled at 50 MB/s": (Drive(50e6, 1e-3, 1, CHUNK), CHUNK, 8_000),
}


@pytest.mark.parametrize("name", DRIVES)
def test_a_drive_gets_what_it_needs_and_no_longer_queue(name: str) -> None:
    drive, chunk_bytes, chunks = DRIVES[name]
    caps = learned(chunk_bytes)
    calls = Calls(replace(drive), chunk_bytes, caps)
    calls.run(chunks)
    seen = [calls.cap() for _ in range(60) if calls.run(50)]
    found = statistics.mode(seen)  # most of the time there is no trial
    full = fixed_rate(drive, chunk_bytes, CEILING)
    assert fixed_rate(drive, chunk_bytes, found) >= 0.9 * full
    assert found <= LEAST_CHUNKS or fixed_rate(drive, chunk_bytes, two_steps_below(found)) < 0.97 * full
    assert calls.run(2000) >= 0.9 * full  # with its trials
    assert all(LEAST_CHUNKS * chunk_bytes <= each <= CEILING * chunk_bytes for each in calls.changes)
    assert min(calls.ends.values()) >= 0.9 * max(calls.ends.values())  # no call starves


def test_writes_have_a_cap_of_their_own() -> None:
    calls = Calls(Drive(0.5e9, 100e-6, 8), CHUNK, learned(), ops=(WRITE,) * 4)
    calls.run(4000)
    assert calls.cap(WRITE) < CHUNKS
    assert calls.cap(READ) == CHUNKS


def test_a_drive_that_changes_is_followed() -> None:
    slow, fast = Drive(0.5e9, 100e-6, 4), Drive(2e9, 2e-3, 4, CHUNK)
    calls = Calls(replace(slow), CHUNK, learned())
    for drive, low, high in ((slow, 2, 4), (fast, 15, 25), (slow, 2, 4)):
        calls.drive = replace(drive)
        runs = 0
        while not low <= calls.cap() <= high:
            calls.run(500)
            runs += 1
            assert runs < 100


def test_a_drive_that_reports_all_at_once_is_not_slowed_down() -> None:
    drive = Drive(1e9, 1e-3, 8, 4 * MiB, at_once=True)
    calls = Calls(drive, 32 * MiB, learned(32 * MiB))
    calls.run(6000)
    assert calls.run(1000) >= 0.9 * fixed_rate(drive, 32 * MiB, CHUNKS)


# --- what teaches nothing ---


def test_a_volume_that_is_not_well_teaches_nothing() -> None:
    calls = Calls(Drive(0.5e9, 100e-6), CHUNK, learned(well=False))
    calls.run(3000)
    assert not calls.changes


@pytest.mark.parametrize("fails", [0.3, 1.0])
def test_chunks_that_fail_teach_nothing(fails: float) -> None:
    calls = Calls(Drive(0.5e9, 100e-6, fails=fails), CHUNK, learned())
    calls.run(3000)
    assert not calls.changes


@pytest.mark.parametrize(("calls", "ahead"), [(1, CHUNKS), (2, 4), (4, 1)])
def test_calls_that_the_cap_does_not_hold_back_teach_nothing(calls: int, ahead: int) -> None:
    made = Calls(Drive(0.5e9, 100e-6), CHUNK, learned(), ops=(READ,) * calls, ahead=ahead)
    made.run(3000)
    assert not made.changes


def test_reads_and_writes_at_the_same_time_teach_nothing() -> None:
    calls = Calls(Drive(0.5e9, 100e-6), CHUNK, learned(), ops=(READ, READ, WRITE, WRITE), ahead=3)
    calls.run(3000)
    assert not calls.changes


def test_a_drive_that_is_mostly_idle_teaches_nothing() -> None:
    calls = Calls(Drive(0.5e9, 100e-6), CHUNK, learned())
    for _ in range(300):
        calls.run(10)
        calls.stop(1.0)
        calls.go_on()
    assert not calls.changes


@pytest.mark.parametrize("seed", range(2))
def test_a_drive_that_stops_or_crawls_now_and_then_keeps_what_it_needs(seed: int) -> None:
    well, crawls = Drive(0.5e9, 2e-3, 4), Drive(0.01e9, 50e-3, 4)
    calls, draw = Calls(replace(well), CHUNK, learned()), random.Random(seed)
    for _ in range(30):
        calls.drive = replace(well)
        calls.run(draw.randrange(100, 500))
        calls.now += draw.choice((0.0, 3.0))
        calls.drive = replace(crawls)
        calls.run(draw.randrange(CHUNKS * MOST + 1, 50))
    calls.drive = replace(well)
    calls.run(100)
    assert calls.cap() <= 12
    assert calls.run(1000) >= 0.9 * fixed_rate(well, CHUNK, CEILING)


def test_pauses_between_do_not_count_against_a_drive() -> None:
    drive = Drive(1e9, 5e-3, 8, CHUNK)
    calls = Calls(replace(drive), CHUNK, learned())
    for _ in range(80):
        calls.run(400)
        calls.stop(5.0)
        calls.go_on()
    calls.run(300)
    assert calls.run(2000) >= 0.9 * fixed_rate(drive, CHUNK, CEILING)


def test_a_late_chunk_teaches_nothing_until_the_engine_lets_go_of_it() -> None:
    """What is left of the cap beside it is not what is measured."""
    caps = learned()
    policy = TransferPolicy(Limits(), [Caps(CHUNKS * CHUNK, 1 << 20)], caps)
    policy.submit(TransferClass.LOAD, READ, 1, NEVER, 0.0)
    request = policy.start(0.0)
    assert request is not None
    late = policy.ask(request, {0: Cost(CHUNK, 1)}, 0.0)
    policy.late(late, 0.0)
    asks = [policy.ask(request, {0: Cost(CHUNK, 1)}, 0.0) for _ in range(CHUNKS)]
    for number in range(2000):
        done = asks.pop(0)
        done.moved = True
        policy.done(done, number * 1e-3)
        asks.append(policy.ask(request, {0: Cost(CHUNK, 1)}, number * 1e-3))
    assert policy.volumes[0].caps[READ].nbytes == CHUNKS * CHUNK
    policy.done(late, 2.0)
    asks.append(policy.ask(request, {0: Cost(CHUNK, 1)}, 2.0))
    for number in range(2000):
        done = asks.pop(0)
        done.moved = True
        policy.done(done, 2 + number * 1e-3)
        asks.append(policy.ask(request, {0: Cost(CHUNK, 1)}, 2 + number * 1e-3))
    assert policy.volumes[0].caps[READ].nbytes < CHUNKS * CHUNK


# --- the search by itself ---


@settings(max_examples=200)
@given(
    start=st.integers(1, 20), rates=st.lists(st.floats(1e-3, 1e12, allow_nan=False), min_size=1, max_size=400)
)
def test_the_caps_stay_within_their_bounds_and_change_by_a_step_at_a_time(
    start: int, rates: list[float]
) -> None:
    search, used = CapSearch(start), [start]
    for rate in rates:
        used.append(search.in_use)
        search.measured(rate)
    assert min(LEAST_CHUNKS, start) <= min(used)
    assert max(used) <= MOST * start
    for before, after in itertools.pairwise(used):
        low, high = sorted((before, after))
        assert high <= max(low * STEP + 1, low + 1)  # a whole chunk at least


def play(search: CapSearch, needed: float, intervals: int, noise: float, draw: random.Random) -> float:
    """A drive that is as fast as it can be with `needed` chunks under way. `noise`: of the logarithm of its rate. The share of its
    bandwidth that was used."""
    shares = []
    for _ in range(intervals):
        shares.append(min(1.0, search.in_use / needed))
        search.measured(1e9 * shares[-1] * math.exp(draw.gauss(0, noise)))
    return statistics.fmean(shares)


@pytest.mark.parametrize("needed", [2, 3, 4, 6, 8, 11, 16, 24, 32])
def test_it_finds_what_a_drive_needs_within_250_intervals(needed: int) -> None:
    for seed in range(10):
        search, draw = CapSearch(CHUNKS), random.Random(seed)
        play(search, needed, 250, 0.02, draw)
        assert 0.93 * needed <= search.chunks <= needed * STEP + 1
        assert play(search, needed, 1000, 0.02, draw) >= 0.93


def test_a_drive_whose_rate_jumps_about_loses_next_to_nothing() -> None:
    shares = [play(CapSearch(CHUNKS), 7.0, 2000, 0.5, random.Random(seed)) for seed in range(20)]
    assert statistics.fmean(shares) >= 0.97
    assert min(shares) >= 0.85


def test_where_nothing_is_to_be_found_trials_become_rare() -> None:
    search, draw, tried = CapSearch(CHUNKS), random.Random(1), 0
    play(search, CHUNKS, 1000, 0.01, draw)
    for _ in range(1000):
        tried += search.in_use != search.chunks
        play(search, CHUNKS, 1, 0.01, draw)
    assert 0 < tried <= 1000 * len(ORDER) / 2 / REST[1]


def test_two_chunks_fit_whatever_the_size_of_a_page() -> None:
    """A page that is larger than a chunk is a chunk of its own."""
    meter, page = CapMeter(MiB, CHUNKS), 3 * MiB
    now = 0.0
    for _ in range(3000):
        meter.lacked(now)
        now += 0.01
        meter.ended(page, now, lambda: True)
    assert meter.nbytes == 2 * page

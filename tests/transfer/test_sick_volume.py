"""A drive that hangs, errs or crawls in the middle of a replay: the other one goes on, and it comes back by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gdsstore import Store
from gdsstore.engines.base import Op
from gdsstore.volume.health import Breaker, HealthLimits
from tests.engines.rig import HangingMemory
from tests.store.helpers import WAIT_S, check, memory_directory, opaque, small_store
from tests.transfer.sick_drives import PAGE_BYTES, PAGES, Drives, Replay, Sickness

WELL, SICK = 0, 1
DEADLINE_S = 1.0
LATE = {"MISS_DEADLINE", "FAILED_DEADLINE"}


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shipped, but the first try comes after a fifth of a second instead of a whole one."""
    monkeypatch.setattr("gdsstore.store_core.HealthLimits", lambda: HealthLimits(first_retry_s=0.2))


def open_on(drives: Drives) -> Store:
    return small_store(
        drives.paths,
        own_engine=drives.engine,
        drive_breaker="auto",
        io_deadline_s=DEADLINE_S,
        workers=6,
        maintain_interval_s=0.05,
    )


def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def breakers(store: Store, volume: int) -> set[Breaker]:
    return {store.health[op][volume].breaker for op in Op}


def mostly(outcomes: list[str]) -> set[str]:
    """Those of calls that had their time: at its deadline ends, too, whatever a busy machine gave no processor."""
    late = sum(outcomes.count(name) for name in LATE)
    assert late < len(outcomes) / 2, outcomes
    return set(outcomes) - LATE


@pytest.mark.parametrize("sickness", [Sickness.HANGS, Sickness.ERRS])
@pytest.mark.parametrize("deadline_s", [DEADLINE_S, DEADLINE_S / 4], ids=["", "short-deadlines"])
def test_a_sick_drive_is_left_alone_and_comes_back(
    tmp_path: Path, sickness: Sickness, deadline_s: float
) -> None:
    drives = Drives(tmp_path, sickness)
    with open_on(drives) as store, Replay(store, deadline_s) as replay:
        seen = replay.seen
        time.sleep(0.3)
        with drives.being_sick():
            until(lambda: Breaker.CLOSED not in breakers(store, SICK))
            time.sleep(deadline_s + 0.1)  # what began before has ended
            start = time.monotonic()
            until(lambda: seen.of(SICK, start).count("MISS_VOLUME_SICK") > 20)
            until(lambda: seen.of(WELL, start).count("LOADED") > 20)
            until(lambda: seen.saved(start).count("SAVED") > 5)
            end = time.monotonic()
        assert mostly(seen.of(SICK, start, end)) == {"MISS_VOLUME_SICK"}
        assert mostly(seen.of(WELL, start, end)) == {"LOADED"}
        assert mostly(seen.saved(start, end)) == {"SAVED"}
        assert breakers(store, WELL) == {Breaker.CLOSED}
        until(lambda: breakers(store, SICK) == {Breaker.CLOSED})
        start = time.monotonic()
        until(lambda: seen.of(SICK, start).count("LOADED") > 20)
        assert mostly(seen.of(SICK, start)) == {"LOADED"}
    assert seen.wrong == 0


def test_a_drive_that_crawls_delays_only_its_own_pages(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Sickness.CRAWLS)
    with open_on(drives) as store, Replay(store, DEADLINE_S) as replay:
        seen = replay.seen
        with drives.being_sick():
            start = time.monotonic()
            until(lambda: len(seen.of(SICK, start)) > 4 and len(seen.of(WELL, start)) > 100)
        assert mostly(seen.of(WELL, start)) == {"LOADED"}
        start = time.monotonic()
        until(lambda: len(seen.of(SICK, start + 0.5)) > 20)
        assert mostly(seen.of(SICK, start + 0.5)) == {"LOADED"}
    assert seen.wrong == 0


def test_a_sick_drive_is_tried_though_nobody_asks_for_its_pages(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Sickness.HANGS)
    with open_on(drives) as store:
        with Replay(store, DEADLINE_S), drives.being_sick():
            until(lambda: Breaker.CLOSED not in breakers(store, SICK))
        until(lambda: breakers(store, SICK) == {Breaker.CLOSED})


def test_a_try_that_hangs_blocks_nothing_and_is_the_only_one(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Sickness.HANGS)
    with open_on(drives) as store, Replay(store, DEADLINE_S) as replay, drives.being_sick():
        until(lambda: Breaker.CLOSED not in breakers(store, SICK))
        until(lambda: all(store.health[op][SICK].snapshot().opened > 1 for op in Op))  # a try has failed
        hangs = drives.engine.injected["hang"]
        time.sleep(1.0)
        assert drives.engine.injected["hang"] == hangs
        start = time.monotonic()
        until(lambda: len(replay.seen.of(WELL, start)) > 20)
    leftovers = [file for path in drives.paths for file in (path / "segments").glob(".probe*")]
    assert leftovers == []


def test_a_drive_that_hangs_in_the_kernel_leaves_the_other_one_alone(tmp_path: Path) -> None:
    """Its requests keep the threads of its engine busy, and no others."""
    with memory_directory() as other:
        paths = [tmp_path / "well", other / "sick"]
        if os.stat(tmp_path).st_dev == os.stat(other).st_dev:
            pytest.skip("there is only one filesystem here")
        with small_store(paths, workers=4, io_deadline_s=DEADLINE_S) as store:
            replay = Replay(store, DEADLINE_S)
            memory = HangingMemory(PAGES * PAGE_BYTES // 4096)
            pages, keys = opaque(store, PAGE_BYTES), replay.prompts[SICK][0]
            stuck = pages.load(keys, memory.bytes.reshape(PAGES, PAGE_BYTES)).result(WAIT_S)
            assert stuck.reasons() == {"MISS_DEADLINE": PAGES}
            assert stuck.memory_in_use
            for keys in replay.prompts[WELL]:
                assert check(pages, keys, PAGE_BYTES).all_ok
            memory.release()

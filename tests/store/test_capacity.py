"""The disk is bounded; what goes is the coldest, and what was just reported stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import PageStatus, Store
from gdsstore.catalog import heat as heat_module
from tests.store.helpers import (
    MiB,
    check,
    forget_catalog,
    load,
    make_keys,
    memory_directory,
    opaque,
    physical_bytes,
    save,
    segments,
    small_store,
)

PAGE = 65536
IN_A_SEGMENT = 15  # pages of 64 KiB in a segment of 1 MiB


class Clock:
    now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heat_module, "time", made)
    return made


def settle(store: Store) -> None:
    """What the maintainer would do in time."""
    for _ in range(1000):
        before = store.stats()["segments"]
        store.upkeep.turn()
        if store.stats()["segments"] == before:
            return
    raise AssertionError("the maintainer never comes to rest")


@pytest.mark.parametrize(
    ("capacity", "segment", "times"),
    [("16MiB", "1MiB", 10), ("32MiB", "1MiB", 10), ("64MiB", "4MiB", 3), ("64MiB", "16MiB", 3)],
)
def test_many_times_the_capacity_never_takes_more_than_the_capacity(
    memory_path: Path, capacity: str, segment: str, times: int
) -> None:
    path = memory_path / "s"
    with small_store(path, capacity=capacity, segment_bytes=segment, free_segments=1) as store:
        namespace = opaque(store, PAGE)
        limit, written, turn = store.capacity_bytes, 0, 0
        content = np.zeros((IN_A_SEGMENT, PAGE), np.uint8)
        while written < times * limit:
            keys = make_keys(IN_A_SEGMENT, turn)
            assert namespace.save(keys, content).result(60).count(PageStatus.SAVED) == IN_A_SEGMENT
            written += content.nbytes
            turn += 1
            if turn % 5 == 0:
                store.upkeep.turn()
                assert physical_bytes(path) <= limit, "more of the drive is used than was allowed"
        newest = make_keys(IN_A_SEGMENT, turn - 1)
        assert load(namespace, newest, PAGE)[0].all_ok
        said = store.stats()["physical_bytes"]
        assert said <= physical_bytes(path) <= said + MiB  # and locks, and other small files
        assert physical_bytes(path) > limit // 2  # the room is used
        assert store.stats()["pages_reclaimed"] > 0
    forget_catalog(path)
    with small_store(path, capacity=capacity) as store:
        settle(store)
        assert physical_bytes(path) <= limit


def test_the_coldest_segment_goes_first(tmp_path: Path, clock: Clock) -> None:
    with small_store(tmp_path / "s", capacity="20MiB") as store:
        namespace = opaque(store, PAGE)
        groups: list[np.ndarray] = []
        while not store.stats()["pages_reclaimed"]:
            groups.append(make_keys(IN_A_SEGMENT, len(groups)))
            save(namespace, groups[-1], PAGE)
            clock.now += 1
            if len(groups) > 1:  # used again and again, though the oldest
                assert namespace.lookup(groups[0]) == IN_A_SEGMENT
                assert load(namespace, groups[2 % len(groups)], PAGE)[0].ok.any()
        assert namespace.contains(groups[0]).all()
        assert namespace.contains(groups[2]).all()
        assert not namespace.contains(groups[1]).any()
        for _ in range(3 * len(groups)):
            groups.append(make_keys(IN_A_SEGMENT, len(groups)))
            save(namespace, groups[-1], PAGE)
            clock.now += 1
            assert namespace.lookup(groups[0]) == IN_A_SEGMENT
        assert check(namespace, groups[0], PAGE).all_ok
        assert not namespace.contains(groups[3]).any()


def test_what_was_looked_up_stays_loadable_for_the_grace_period(tmp_path: Path, clock: Clock) -> None:
    with small_store(tmp_path / "s", capacity="16MiB", grace_s=30) as store:
        namespace = opaque(store, PAGE)
        groups = [make_keys(IN_A_SEGMENT, turn) for turn in range(200)]
        saved = 0
        while save(namespace, groups[saved], PAGE).all_ok and not store.stats()["pages_reclaimed"]:
            saved += 1
            clock.now += 1
        everything = np.concatenate(groups[: saved + 1])
        there = namespace.contains(everything)
        assert there.sum() >= 3 * IN_A_SEGMENT
        refused = [save(namespace, group, PAGE) for group in groups[saved + 1 : saved + 40]]
        assert refused[-1].count(PageStatus.FAILED_NO_SPACE) == IN_A_SEGMENT
        assert check(
            namespace, everything[there], PAGE
        ).all_ok  # every single one of those that were reported
        clock.now += 31
        assert save(namespace, groups[-1], PAGE).all_ok
        assert not namespace.contains(everything).all()


def test_a_clock_that_goes_back_neither_stops_reclaim_nor_loses_pages(tmp_path: Path, clock: Clock) -> None:
    with small_store(tmp_path / "s", capacity="16MiB", grace_s=30) as store:
        namespace = opaque(store, PAGE)
        for turn in range(60):
            keys = make_keys(IN_A_SEGMENT, turn)
            assert save(namespace, keys, PAGE).all_ok
            assert check(namespace, keys, PAGE).all_ok
            clock.now -= 100
            assert namespace.lookup(keys) == IN_A_SEGMENT
            clock.now -= 3600
        assert store.stats()["pages_reclaimed"] > 0


def test_a_lone_process_may_change_the_capacity(memory_path: Path) -> None:
    path = memory_path / "s"
    keys = make_keys(600)

    def fill(capacity: str) -> int:
        with small_store(path, capacity=capacity) as store:
            settle(store)
            assert physical_bytes(path) <= store.capacity_bytes
            for start in range(0, 600, 50):
                save(opaque(store, PAGE), keys[start : start + 50], PAGE)
            settle(store)
            assert physical_bytes(path) <= store.capacity_bytes
            check(opaque(store, PAGE), keys, PAGE)
            return len(segments(path))

    counts = [fill(capacity) for capacity in ("32MiB", "20MiB", "48MiB", "16MiB")]
    assert counts[1] < counts[0] < counts[2]
    assert counts[3] < counts[1]


def test_space_of_another_page_size_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with small_store(path, capacity="16MiB") as store:
        for turn in range(30):
            nbytes = (PAGE, 5000, 200_000)[turn % 3]
            namespace = opaque(store, nbytes)
            keys = make_keys((30, 300, 10)[turn % 3], turn)
            assert save(namespace, keys, nbytes).all_ok
            assert check(namespace, keys, nbytes).all_ok
        assert physical_bytes(path) <= store.capacity_bytes


def test_the_maintainer_keeps_segments_ready(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", capacity="16MiB", free_segments=2) as store:
        assert save(opaque(store, PAGE), make_keys(5), PAGE).all_ok
        settle(store)
        assert store.stats()["maintainer"]
        states = store.stats()["segments"]
        assert states["free"] + states["open"] >= 2
        assert store.reclaimer.ready().free[0] in (2, 3)  # the turns of `settle` run beside the store's own


def test_preallocating_makes_the_segments_and_reports_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with small_store(tmp_path / "s", capacity="32MiB") as store:
        assert store.preallocate(4 * MiB, lambda there, wanted: seen.append((there, wanted))) == 4
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
        count = store.preallocate()
        assert count == store.reclaimer.max_segments() == len(segments(tmp_path / "s"))
        assert physical_bytes(tmp_path / "s") <= store.capacity_bytes
        assert store.preallocate() == count


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENOMEM])
def test_a_segment_that_cannot_be_opened_now_loses_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No descriptors left, a drive that went read-only: that says nothing about what the segment holds."""
    path = tmp_path / "s"
    with small_store(path, capacity="16MiB") as store:
        namespace = opaque(store, PAGE)
        keys = make_keys(20)
        assert save(namespace, keys, PAGE).all_ok
    real = os.open

    def refused(name: Any, *rest: Any) -> int:
        if str(name).endswith(".seg"):
            raise OSError(code, os.strerror(code), name)
        return real(name, *rest)

    with small_store(path, capacity="16MiB") as store:
        namespace = opaque(store, PAGE)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refused)
            assert not save(namespace, make_keys(400, "more"), PAGE).all_ok
            assert check(namespace, keys, PAGE).count(PageStatus.MISS_SEGMENT) == 20
            assert store.reclaimer.reclaim_one() is None
            namespace.delete(make_keys(3, "none"))
        assert store.stats()["segments"]["lost"] == 0
        assert check(namespace, keys, PAGE).all_ok
        assert save(namespace, make_keys(20, "again"), PAGE).all_ok


def test_a_capacity_that_the_drive_does_not_have_is_said(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_store(memory_path, capacity="64MiB").close()
    assert "filesystems" not in caplog.text
    small_store(memory_path, capacity="900TiB").close()
    assert "900TiB is more than" in caplog.text

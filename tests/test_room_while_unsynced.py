"""Segments that no fdatasync has covered yet take part in reclaim like all others, and are still synced when asked for."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdsstore
from gdsstore.catalog import allocate
from gdsstore.engines.posix import PosixEngine
from gdsstore.transfer import commit
from gdsstore.volume.volume import write_entries

PAGE_BYTES = 64 << 10
PAGES_A_SEGMENT = 15  # of 1 MiB
SEGMENTS = 8


def fresh_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def open_segment_files(store: Path) -> int:
    """Of this store: a hang that another test left behind keeps its own."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    files = [Path(os.readlink(link)) for link in links if link.is_symlink()]
    return sum(file.suffix == ".seg" and file.is_relative_to(store) for file in files)


@pytest.fixture(autouse=True)
def upkeep_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are taken by the tests alone, and at an interval that never comes."""
    monkeypatch.setattr("gdsstore.upkeep.Upkeep.nudge", lambda self: None)


def small_store(path: Path, durability: str) -> gdsstore.Store:
    return gdsstore.open(
        path,
        capacity="24MiB",
        segment_bytes="1MiB",
        engine=PosixEngine(2),
        durability=durability,
        maintain_interval_s=3600,
        io_deadline_s=30,
        drive_breaker="off",
    )


def fill_around(namespace: gdsstore.BoundNamespace, rounds: int) -> list[gdsstore.SaveResult]:
    """Save a segment's worth of pages, again and again, faster than anything is synced."""
    pages = np.ones((PAGES_A_SEGMENT, PAGE_BYTES), np.uint8)
    return [namespace.save(fresh_keys(len(pages)), pages).result(60) for _ in range(rounds)]


@pytest.mark.parametrize("durability", ["none", "interval", "commit"])
def test_a_store_that_is_filled_faster_than_it_syncs_reclaims_instead_of_refusing(
    tmp_path: Path, durability: str
) -> None:
    with small_store(tmp_path, durability) as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        results = fill_around(namespace, 3 * SEGMENTS)
        assert all(result.all_ok for result in results), [result.reasons() for result in results]
        assert store.stats()["segments_reclaimed"] > 0


def test_a_slow_fdatasync_keeps_no_full_segment_from_being_reclaimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(60)

    with small_store(tmp_path, "none") as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        fill_around(namespace, SEGMENTS // 2)
        with monkeypatch.context() as patch:
            patch.setattr(allocate.os, "fdatasync", slow)
            syncing = threading.Thread(target=store.sync)
            syncing.start()
            assert begun.wait(30)
            patch.undo()
            try:
                results = fill_around(namespace, 2 * SEGMENTS)
            finally:
                go_on.set()
                syncing.join(30)
        assert all(result.all_ok for result in results), [result.reasons() for result in results]


def test_a_sync_covers_the_segments_that_were_filled_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(tmp_path, "none") as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        fill_around(namespace, 4)
        synced: set[int] = set()
        monkeypatch.setattr(allocate.os, "fdatasync", lambda fd: synced.add(os.fstat(fd).st_ino))
        store.sync()
        written = {path.stat().st_ino for path in (tmp_path / "segments").iterdir()}
        assert len(written) >= 4
        assert written <= synced


def test_a_sync_waits_for_one_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has taken note of all unsynced segments: the second must not say "durable" before it has synced them."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(30)

    with small_store(tmp_path, "none") as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        fill_around(namespace, 1)
        with monkeypatch.context() as patch:
            patch.setattr(allocate.os, "fdatasync", slow)
            first = threading.Thread(target=store.sync)
            second = threading.Thread(target=lambda: (store.sync(), ended.set()))
            first.start()
            assert begun.wait(30)
            second.start()
            try:
                assert not ended.wait(0.2)
            finally:
                go_on.set()
                first.join(30)
                second.join(30)
            assert ended.is_set()


def test_a_sync_just_before_a_record_table_is_written_does_not_count_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    with small_store(tmp_path, "none") as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))

        def write(*arguments: Any) -> None:
            store.sync()
            write_entries(*arguments)
            order.append("written")

        monkeypatch.setattr(commit, "write_entries", write)
        monkeypatch.setattr(allocate.os, "fdatasync", lambda fd: order.append("synced"))
        namespace.save(fresh_keys(1), np.ones((1, PAGE_BYTES), np.uint8)).result(30)
        store.sync()
        assert order[-2:] == ["written", "synced"]


def test_unsynced_segments_keep_a_bounded_number_of_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdsstore.upkeep.MAX_UNSYNCED_SEGMENTS", 2)
    with small_store(tmp_path, "none") as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        fill_around(namespace, 3 * SEGMENTS)
        before = open_segment_files(tmp_path)
        store.upkeep.turn()
        assert store.pool.unsynced_segments == 0
        assert before - open_segment_files(tmp_path) > SEGMENTS


def test_closing_lets_go_of_every_file(tmp_path: Path) -> None:
    with small_store(tmp_path, "none") as store:
        fill_around(store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES)), 6)
        assert open_segment_files(tmp_path) > 0
    assert open_segment_files(tmp_path) == 0

"""A drive that hangs while a segment is got ready: saves end in time, and others do not wait with it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsstore import Store
from gdsstore.catalog import allocate
from gdsstore.catalog.records import SegmentRow
from gdsstore.catalog.take import SegmentTaker
from gdsstore.engines.base import Op
from gdsstore.volume.format import Superblock
from gdsstore.volume.health import Breaker
from gdsstore.volume.volume import Volume
from tests.store.helpers import WAIT_S, make_keys, opaque, save, segments, small_store, statuses, truth

LONG_S = 30.0


class Gate:
    """Lets nobody make a segment on one volume until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, volume: int) -> None:
        self.opened, self.waiting = threading.Event(), 0
        make = Volume.create_segment

        def create(me: Volume, superblock: Superblock) -> None:
            if me.index == volume and not self.opened.is_set():
                self.waiting += 1
                assert self.opened.wait(LONG_S)
            make(me, superblock)

        monkeypatch.setattr(Volume, "create_segment", create)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, 0)
    yield gate
    gate.opened.set()


def one(path: Path, **settings: object) -> Store:
    return small_store(path / "s", **settings)


def test_a_save_ends_at_its_deadline_and_the_next_one_does_not_start_over(tmp_path: Path, gate: Gate) -> None:
    keys = make_keys(8)
    with one(tmp_path) as store:
        end = time.monotonic() + WAIT_S
        for _ in range(2):
            start = time.monotonic()
            result = save(opaque(store), keys, deadline_s=0.2)
            assert time.monotonic() - start < LONG_S / 2
            assert statuses(result) == ["FAILED_DEADLINE"] * 8
            while gate.waiting == 0 and time.monotonic() < end:  # a machine may need all that time to begin
                save(opaque(store), keys, deadline_s=0.2)
        assert gate.waiting == 1
        gate.opened.set()
        assert save(opaque(store), keys).all_ok


def test_saves_with_room_in_another_segment_go_on(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    with one(tmp_path, workers=6) as store:
        small, large = opaque(store, 8192), opaque(store, 16384)
        assert save(small, make_keys(4), 8192).all_ok
        gate.opened.clear()
        stuck = threading.Thread(target=save, args=(large, make_keys(4, "large"), 16384))
        stuck.start()
        end = time.monotonic() + WAIT_S
        while gate.waiting == 0 and time.monotonic() < end:
            time.sleep(0.001)
        assert save(small, make_keys(4, "more"), 8192).all_ok
        assert stuck.is_alive()
        gate.opened.set()
        stuck.join(WAIT_S)


def test_another_volume_takes_the_pages_once_this_one_was_late_too_often(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocate, "STALL_S", 0.1)
    with small_store([tmp_path / "s", tmp_path / "t"], drive_breaker="auto") as store:
        end, number = time.monotonic() + WAIT_S, 0
        while store.health[Op.WRITE][0].breaker is Breaker.CLOSED and time.monotonic() < end:
            number += 1
            save(opaque(store), make_keys(4, number), deadline_s=0.2)
        for extra in range(6):
            assert save(opaque(store), make_keys(4, f"well {extra}"), deadline_s=10).all_ok
        gate.opened.set()


def test_a_store_closes_while_a_segment_is_got_ready(tmp_path: Path, gate: Gate) -> None:
    store = one(tmp_path)
    save(opaque(store), make_keys(4), deadline_s=0.1)
    start = time.monotonic()
    store.close(timeout_s=0.5)
    assert time.monotonic() - start < LONG_S / 2
    gate.opened.set()
    with one(tmp_path) as again:
        assert save(opaque(again), make_keys(4)).all_ok


def test_what_getting_a_segment_raises_fails_the_saves_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(me: Volume, superblock: Superblock) -> None:
        raise RuntimeError("a bug")

    with one(tmp_path) as store:
        monkeypatch.setattr(Volume, "create_segment", broken)
        assert statuses(save(opaque(store), make_keys(4))) == ["FAILED_IO"] * 4
        monkeypatch.undo()
        assert store.stats()["segments"]["lost"] == 0, "it would count against the capacity"
        assert save(opaque(store), make_keys(4)).all_ok


def test_a_segment_that_is_got_ready_is_among_those_that_a_forked_child_lets_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    check = SegmentTaker._check

    def slow(me: SegmentTaker, row: SegmentRow, volume: Volume, fd: int) -> None:
        reached.set()
        assert go_on.wait(LONG_S)
        check(me, row, volume, fd)

    monkeypatch.setattr(SegmentTaker, "_check", slow)
    with one(tmp_path) as store:
        future = opaque(store).save(make_keys(4), truth(make_keys(4), 8192))
        assert reached.wait(WAIT_S)
        files = [os.readlink(f"/proc/self/fd/{fd}") for fd in store.pool.lock_fds]
        assert files == [str(path) for path in segments(tmp_path / "s")]
        go_on.set()
        assert future.result(WAIT_S).all_ok
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in store.pool.lock_fds] == files

"""`Store.sync` and upkeep, where an fdatasync hangs: they go on, and no failure is forgotten."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from gdsstore import DeadlineError, VolumeError
from tests.store.helpers import make_keys, opaque, save, small_store
from tests.transfer.late_drive import LONG_S, LateDrive, soon

SHORT_S = 0.3


def test_store_sync_has_a_deadline_and_the_next_one_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = LateDrive(monkeypatch, "fdatasync", tmp_path / "s" / "segments")
    with small_store(tmp_path / "s", durability="none") as store:
        assert save(
            opaque(store), make_keys(200)
        ).all_ok  # more than a segment: one is given up before it is synced
        drive.armed = 1
        for _ in range(2):
            with pytest.raises(DeadlineError, match="sync again"):
                store.sync(deadline_s=SHORT_S)
        drive.release()
        store.sync()
        assert store.pool.unsynced_segments == 0


def test_an_fdatasync_that_fails_late_is_told_of_by_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Event()

    def fails_late(fd: int) -> None:
        begun.set()
        assert go.wait(LONG_S)
        raise OSError(5, "refused")

    with small_store(tmp_path / "s", durability="none") as store:
        assert save(opaque(store), make_keys(120)).all_ok  # fills the segment, which is given up
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails_late)
            with pytest.raises(DeadlineError):
                store.sync(deadline_s=SHORT_S)
            assert begun.wait(LONG_S)
            go.set()
            soon(lambda: not store.pool._syncs._running)
        with pytest.raises(VolumeError, match="fdatasync"):
            store.sync()


def test_upkeep_goes_on_though_an_fdatasync_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = LateDrive(monkeypatch, "fdatasync", tmp_path / "s" / "segments")
    monkeypatch.setattr("gdsstore.upkeep.SYNC_WAIT_S", 0.05)
    monkeypatch.setattr("gdsstore.upkeep.Upkeep.nudge", lambda self: None)  # the turns are taken here alone
    with small_store(tmp_path / "s", durability="interval", sync_interval_s=0.01) as store:
        assert save(opaque(store), make_keys(4)).all_ok
        drive.armed = 1
        for _ in range(3):
            time.sleep(0.02)
            store.upkeep.turn()
            soon(lambda: drive.waiting == 1)
        looked = threading.Event()
        monkeypatch.setattr(store.reclaimer, "shrink", lambda: looked.set() or True)
        time.sleep(0.02)
        store.upkeep.turn()
        assert looked.is_set()
        drive.release()

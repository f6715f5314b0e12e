"""A drive that hangs while a record table is written or synced: saves end in time, and others go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsstore import DeadlineError, SaveResult, Store
from gdsstore.catalog import allocate
from gdsstore.engines.base import Op
from gdsstore.volume.health import Breaker
from tests.store.helpers import U8, WAIT_S, check, make_keys, opaque, save, small_store, truth
from tests.transfer.late_drive import CALLS, LONG_S, LateDrive, open_segment_files, soon
from tests.transfer.layered_rig import LAYOUT, bind
from tests.transfer.test_layered_save import Computing, assert_stored, start

SHORT_S = 0.3


@pytest.fixture(params=CALLS)
def drive(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[LateDrive]:
    drive = LateDrive(monkeypatch, request.param, tmp_path / "s" / "segments")
    yield drive
    drive.release()
    soon(lambda: drive.waiting == 0)


def open_one(tmp_path: Path, **settings: object) -> Store:
    return small_store(tmp_path / "s", durability="commit", **settings)


def open_two(tmp_path: Path, **settings: object) -> Store:
    return small_store([tmp_path / "s", tmp_path / "t"], durability="commit", **settings)


def hang(store: Store, drive: LateDrive, salt: object = "late", deadline_s: float = SHORT_S) -> None:
    """A save, of which the table write or the fdatasync hangs."""
    begun = drive.begun
    for number in range(100):  # a busy machine may take all the time of one before it gets there
        drive.armed = 1
        keys = make_keys(4, f"{salt} {number}")
        result = save(opaque(store), keys, deadline_s=deadline_s)
        drive.armed = 0
        assert result.reasons() == {"FAILED_DEADLINE": 4}
        assert not opaque(store).contains(keys).any()
        if drive.begun > begun:
            return
    raise AssertionError("nothing hung")


def test_a_save_ends_by_its_deadline_and_all_is_well_when_the_drive_answers(
    tmp_path: Path, drive: LateDrive
) -> None:
    with open_one(tmp_path) as store:
        kept = make_keys(20, "kept")
        assert save(opaque(store), kept).all_ok
        hang(store, drive)
        assert drive.waiting == 1
        assert check(opaque(store), kept).all_ok
        drive.release()
        assert save(opaque(store), make_keys(20, "more")).all_ok
        assert check(opaque(store), make_keys(20, "more")).all_ok
        soon(lambda: drive.waiting == 0)
        store.sync()
    assert open_segment_files(tmp_path) == 0


def test_saves_on_another_volume_go_on(
    tmp_path: Path, drive: LateDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_two(tmp_path, workers=4) as store:
        monkeypatch.setattr(store.placement, "choose", lambda: 0)
        assert save(opaque(store), make_keys(4)).all_ok
        drive.armed = 1
        stuck = opaque(store).save(make_keys(4, "late"), truth(make_keys(4, "late"), 8192), deadline_s=LONG_S)
        soon(lambda: drive.waiting == 1)
        monkeypatch.setattr(store.placement, "choose", lambda: 1)
        for number in range(5):
            assert save(opaque(store), make_keys(4, number)).all_ok
            assert check(opaque(store), make_keys(4, number)).all_ok
        assert not stuck.done()
        drive.release()
        assert stuck.result(WAIT_S).all_ok


def test_a_save_over_several_volumes_loses_only_the_pages_of_the_late_one(
    tmp_path: Path, drive: LateDrive
) -> None:
    with open_two(tmp_path, chunk_bytes="64KiB") as store:
        for number in range(4):
            assert save(opaque(store), make_keys(16, number)).all_ok
        for number in range(20):  # a busy machine may take all the time of one before it gets there
            keys = make_keys(32, f"late {number}")
            drive.armed = 1
            result = save(opaque(store), keys, deadline_s=1.0)
            assert (opaque(store).contains(keys) == result.ok).all()
            assert check(opaque(store), keys[result.ok]).all_ok
            drive.release()
            if set(result.reasons()) == {"SAVED", "FAILED_DEADLINE"}:
                break
        else:
            raise AssertionError("the pages of both volumes went")
        assert save(opaque(store), keys).all_ok


def test_a_layer_wise_save_ends_by_its_deadline(tmp_path: Path, drive: LateDrive) -> None:
    def saved(keys: U8, deadline_s: float) -> SaveResult:
        memory = Computing(LAYOUT, keys)
        memory.compute_all()
        return start(store, memory, keys, deadline_s=deadline_s).result(WAIT_S)

    with open_one(tmp_path) as store:
        assert saved(make_keys(2), WAIT_S).all_ok
        late = make_keys(8, "layers")
        drive.armed = 1
        assert saved(late, 2.0).reasons() == {"FAILED_DEADLINE": 8}
        assert not bind(store).contains(late).any()
        drive.release()
        assert saved(late, WAIT_S).all_ok
        assert_stored(store, late)


def test_a_late_drive_is_blamed(tmp_path: Path, drive: LateDrive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocate, "STALL_S", 0.05)
    with open_two(tmp_path, drive_breaker="auto") as store:
        monkeypatch.setattr(store.placement, "choose", lambda: 0)
        assert save(opaque(store), make_keys(4)).all_ok
        hang(store, drive)
        timeouts = [health.snapshot().timeouts for health in store.health[Op.WRITE]]
        assert timeouts[0] > 0
        assert timeouts[1] == 0
        monkeypatch.undo()
        assert store.health[Op.WRITE][1].breaker is Breaker.CLOSED
        drive.release()


def test_closing_takes_its_time_and_no_longer(tmp_path: Path, drive: LateDrive) -> None:
    store = open_one(tmp_path)
    kept = make_keys(20, "kept")
    assert save(opaque(store), kept).all_ok
    hang(store, drive)
    began = time.monotonic()
    with contextlib.suppress(DeadlineError):  # not all is durable
        store.close(timeout_s=SHORT_S)
    assert time.monotonic() - began < LONG_S / 2
    with open_one(tmp_path) as again:
        assert check(opaque(again), kept).all_ok
        assert save(opaque(again), make_keys(8, "again")).all_ok
        drive.release()
        soon(lambda: drive.waiting == 0)
        assert check(opaque(again), make_keys(8, "again")).all_ok
    soon(lambda: open_segment_files(tmp_path) == 0)

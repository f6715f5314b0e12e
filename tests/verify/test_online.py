"""Verification of an open store: finds what is damaged, and calls nothing damaged that is only being changed."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np

from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.volume.format import ENTRY
from gdsstore.volume.volume import write_entries
from tests.store.helpers import check, flip, make_keys, opaque, save, segments, small_config, small_store
from tests.verify.rig import DATA_OFFSET, PAGE_BYTES, brief, offline, online


def test_every_page_is_read_in_chunks_smaller_and_larger_than_a_record(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        save(opaque(store, PAGE_BYTES), make_keys(40), PAGE_BYTES)
        save(opaque(store, 5000), make_keys(70, "odd"), 5000)
        for chunk in ("64KiB", "256KiB", "4MiB"):
            found = online(store, config=small_config(chunk_bytes=chunk))
            assert found.damaged == []
            assert (found.pages_checked, found.bytes_checked) == (110, 40 * PAGE_BYTES + 70 * 8192)


def test_progress_ends_at_the_whole_and_never_goes_back(tmp_path: Path) -> None:
    from gdsstore.verify.online import verify_online
    from gdsstore.verify.payloads import PayloadReader

    seen: list[tuple[int, int]] = []
    with small_store(tmp_path) as store:
        save(opaque(store, PAGE_BYTES), make_keys(40), PAGE_BYTES)
        with PayloadReader(PosixEngine(2), store.volumes, store.segment_bytes, small_config()) as reader:
            verify_online(store, reader, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (3 << 20, 3 << 20)
    assert len(seen) > 10


def test_dropped_pages_are_no_damage(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        namespace, other = opaque(store, PAGE_BYTES), opaque(store, PAGE_BYTES, pool="other")
        save(namespace, make_keys(40), PAGE_BYTES)
        save(other, make_keys(10), PAGE_BYTES)
        namespace.delete(make_keys(40)[:7])
        other.clear()
        found = online(store)
        assert found.damaged == []
        # Deleted pages have tombstones; cleared ones are whole entries that the catalog does not have.
        assert (found.pages_checked, found.leftovers) == (43, 10)


def test_pages_of_a_free_segment_are_leftovers(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        save(opaque(store, PAGE_BYTES), make_keys(40), PAGE_BYTES)
        assert store.reclaimer.reclaim_one() is not None
        found = online(store)
        assert (found.damaged, found.pages_checked, found.leftovers) == ([], 40, 15)


def test_a_segment_that_is_reclaimed_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    with small_store(tmp_path, capacity="6MiB") as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, make_keys(30), PAGE_BYTES)
        round_ = iter(range(1000))
        found = online(store, before_reading=lambda: save(namespace, make_keys(30, next(round_)), PAGE_BYTES))
        assert found.damaged == []
        assert store.reclaimer.counts.segments > 2


def test_saves_deletes_and_reclaims_at_the_same_time_are_never_damage(tmp_path: Path) -> None:
    stop = threading.Event()
    rounds = 0

    def churn() -> None:
        nonlocal rounds
        while not stop.is_set():
            keys = make_keys(20, rounds)
            save(namespace, keys, PAGE_BYTES)
            namespace.delete(keys[::3])
            rounds += 1

    with small_store(tmp_path, capacity="8MiB") as store:
        namespace = opaque(store, PAGE_BYTES)
        thread = threading.Thread(target=churn)
        thread.start()
        try:
            until = time.monotonic() + 150
            while rounds < 60 and time.monotonic() < until:
                assert online(store).damaged == []
                assert online(store, repair=True).damaged == []
        finally:
            stop.set()
            thread.join()
        assert store.reclaimer.counts.segments > 5
        assert rounds >= 60


def test_a_page_that_the_table_lacks_is_damage(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, make_keys(20), PAGE_BYTES)
        with store.volumes[0].table(0) as fd:
            write_entries(fd, 4, np.zeros(1, ENTRY))
        found = online(store)
        assert brief(found.damaged) == [(0, 4, "entry")]
        assert "the table lacks" in found.damaged[0].what
        assert online(store, repair=True).unrepaired == 0
        assert not namespace.contains(make_keys(20)[4:5])[0]
        assert online(store).damaged == []


def test_an_entry_in_another_slot_s_place_is_damage(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        save(opaque(store, PAGE_BYTES), make_keys(20), PAGE_BYTES)
        raw = bytearray(segments(tmp_path)[0].read_bytes()[4096:8192])
        raw[4 * 128 : 5 * 128] = raw[9 * 128 : 10 * 128]
        with segments(tmp_path)[0].open("r+b") as file:
            file.seek(4096)
            file.write(raw)
        assert brief(online(store).damaged) == [(0, 4, "entry")]


def test_an_error_that_does_not_come_again_is_no_damage(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        save(opaque(store, PAGE_BYTES), make_keys(20), PAGE_BYTES)
        for kind in (FaultKind.CORRUPT, FaultKind.ERRNO, FaultKind.SHORT):
            engine = FaultyEngine(PosixEngine(2), [Fault(kind, limit=2)], 1)
            found = online(store, engine=engine)
            assert sum(engine.injected.values()) == 2
            assert found.damaged == []


def test_a_drive_that_refuses_is_unreadable_and_one_that_hangs_is_not_called_damaged(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, make_keys(20), PAGE_BYTES)
        refuse = [
            Fault(FaultKind.ERRNO, match=lambda plan: plan.file_offset >= DATA_OFFSET + 14 * PAGE_BYTES)
        ]
        found = online(store, engine=FaultyEngine(PosixEngine(2), refuse, 1))
        assert brief(found.damaged) == [(0, 14, "unreadable")]
        late = [Fault(FaultKind.HANG, match=lambda plan: plan.file_offset >= DATA_OFFSET + 14 * PAGE_BYTES)]
        config = small_config(io_deadline_s=3, chunk_bytes="64KiB")
        found = online(store, engine=FaultyEngine(PosixEngine(2), late, 1), repair=True, config=config)
        assert brief(found.damaged) == [(0, 14, "unreadable")]
        assert found.unrepaired == 1
        assert check(namespace, make_keys(20), PAGE_BYTES).all_ok


def test_a_segment_of_another_store_is_foreign_once(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        with small_store(tmp_path / name) as store:
            save(opaque(store, PAGE_BYTES), make_keys(20), PAGE_BYTES)
    stranger = tmp_path / "ours" / "segments" / "00000077.seg"
    shutil.copy(segments(tmp_path / "theirs")[0], stranger)
    assert brief(offline(tmp_path / "ours").damaged) == [(77, None, "foreign")]
    with small_store(tmp_path / "ours") as store:
        found = online(store)
        assert [(each.file, each.kind.value) for each in found.damaged] == [(str(stranger), "foreign")]
        assert found.unrepaired == 0  # opening the store left it out
    with small_store(tmp_path / "ours") as store:
        found = online(store)
        assert found.damaged == []
        assert [each.file for each in found.left_out] == [str(stranger)]
    assert stranger.exists()


def test_damage_from_a_rebuild_is_told(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        save(opaque(store, PAGE_BYTES), make_keys(20), PAGE_BYTES)
    flip(segments(tmp_path)[0], 8 * 100)
    (tmp_path / "catalog" / "data.mdb").unlink()
    with small_store(tmp_path) as store:
        assert brief(online(store).damaged) == [(0, None, "superblock")]

"""A repair drops what is damaged, all of it and nothing else, under the feet of those who use the store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gdsstore.transfer.results import PageStatus
from gdsstore.volume.volume import Volume
from tests.store.helpers import check, flip, load, make_keys, opaque, save, segments, small_store, truth
from tests.verify.rig import DATA_OFFSET, PAGE_BYTES, brief, offline, online


def flip_payload(path: Path, slot: int) -> None:
    flip(path, 8 * (DATA_OFFSET + slot * PAGE_BYTES + 77))


def flip_entry(path: Path, slot: int) -> None:
    flip(path, 8 * (4096 + slot * 128 + 10))


def test_many_damaged_pages_are_dropped_and_the_rest_stays(tmp_path: Path) -> None:
    keys = make_keys(45)
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, keys, PAGE_BYTES)
        for slot in (0, 1, 14):
            flip_payload(segments(tmp_path)[1], slot)
            flip_entry(segments(tmp_path)[2], slot)
        flip_payload(segments(tmp_path)[2], 0)  # entry and payload: one damage
        found = online(store, repair=True)
        assert len(found.damaged) == 6
        assert found.unrepaired == 0
        bad = [15, 16, 29, 30, 31, 44]
        result = check(namespace, keys, PAGE_BYTES)
        assert [at for at in range(45) if not result.ok[at]] == bad
        assert all(result.status[at] == PageStatus.MISS_ABSENT for at in bad)
        assert online(store).damaged == []
        assert save(namespace, keys, PAGE_BYTES).all_ok
        assert check(namespace, keys, PAGE_BYTES).all_ok
    assert offline(tmp_path).damaged == []


def test_a_damaged_leftover_is_buried_too(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        save(opaque(store, PAGE_BYTES), make_keys(20), PAGE_BYTES)
        opaque(store, PAGE_BYTES).clear()
        flip_payload(segments(tmp_path)[0], 2)
        found = online(store, repair=True)
        assert brief(found.damaged) == [(0, 2, "payload")]
        assert (found.damaged[0].pages, found.damaged[0].repaired) == (0, True)
    assert offline(tmp_path).damaged == []


def test_a_process_that_fills_a_damaged_segment_goes_on_elsewhere(tmp_path: Path) -> None:
    keys = make_keys(40)
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, keys[:5], PAGE_BYTES)
        flip(segments(tmp_path)[0], 8 * 50)  # of the segment that this process owns and has not filled
        assert online(store, repair=True).unrepaired == 0
        first = save(namespace, keys, PAGE_BYTES)  # may fail in part: the segment was taken away
        again = save(namespace, keys, PAGE_BYTES)
        assert again.all_ok
        result, memory = load(namespace, keys, PAGE_BYTES)
        assert result.all_ok, (first.reasons(), result.reasons())
        assert (memory == truth(keys, PAGE_BYTES)).all()
        assert online(store).damaged == []


def test_an_entry_that_a_writer_will_write_anew_is_left_to_it(tmp_path: Path) -> None:
    keys = make_keys(15)
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, keys[:5], PAGE_BYTES)
        flip_entry(segments(tmp_path)[0], 9)
        found = online(store, repair=True)
        assert brief(found.damaged) == [(0, 9, "entry")]
        assert found.unrepaired == 1
        save(namespace, keys, PAGE_BYTES)
        assert online(store).damaged == []
        assert check(namespace, keys, PAGE_BYTES).all_ok
        save(namespace, make_keys(5, "more"), PAGE_BYTES)
        flip_entry(segments(tmp_path)[1], 9)
    with small_store(tmp_path) as store:  # nobody fills it now
        found = online(store, repair=True)
        assert (brief(found.damaged), found.unrepaired) == ([(1, 9, "entry")], 0)
        assert online(store).damaged == []


@pytest.mark.parametrize("what", ["payload", "entry", "superblock"])
def test_without_repair_nothing_is_changed(what: str, tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, make_keys(20), PAGE_BYTES)
        path = segments(tmp_path)[0]
        {"payload": flip_payload, "entry": flip_entry, "superblock": lambda p, s: flip(p, 8 * 30)}[what](
            path, 3
        )
        before = path.read_bytes()
        for _ in range(2):
            assert [each.kind.value for each in online(store).damaged] == [what]
        assert path.read_bytes() == before
        assert namespace.contains(make_keys(20)).all()


@pytest.mark.parametrize(
    ("code", "dropped"), [(errno.EMFILE, False), (errno.EACCES, False), (errno.EIO, True)]
)
def test_a_segment_that_cannot_be_opened_is_dropped_only_if_that_is_for_good(
    code: int, dropped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(20)
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        save(namespace, keys, PAGE_BYTES)

        def refuse(self: Volume, segment_id: int) -> int:
            if segment_id == 0:
                raise OSError(code, os.strerror(code), str(self.segment_path(0)))
            return opened(self, segment_id)

        opened = Volume.open_table
        with monkeypatch.context() as patch:
            patch.setattr(Volume, "open_table", refuse)
            found = online(store, repair=True)
        assert brief(found.damaged) == [(0, None, "unreadable")]
        assert found.damaged[0].repaired is dropped
        assert check(namespace, keys, PAGE_BYTES).ok.sum() == (5 if dropped else 20)

"""A catalog that is rebuilt from the record tables says what the lost one said."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import BoundNamespace, PageStatus, Store
from gdsstore.catalog.copies import UNSYNCED_NS
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.keys import index_keys
from gdsstore.catalog.records import Locations, SegmentState
from gdsstore.catalog.recovery import scan_segment
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import EngineError
from gdsstore.verify.copies import Copies
from gdsstore.verify.payloads import PayloadReader
from gdsstore.verify.table import Table
from gdsstore.volume.format import ENTRY, Geometry, Superblock, entry_salt, seal_entries
from gdsstore.volume.volume import Volume, write_entries
from tests.store.helpers import (
    check,
    flip,
    forget_catalog,
    locate,
    make_keys,
    memory_directory,
    opaque,
    save,
    small_store,
)

KEYS = make_keys(400)
SIZES = {"a": 8192, "b": 8192, "c": 20_000}


@pytest.fixture
def path() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory / "s"


def bounds(store: Store) -> dict[str, BoundNamespace]:
    return {pool: opaque(store, nbytes, pool=pool) for pool, nbytes in SIZES.items()}


def save_again(
    store: Store, bound: BoundNamespace, keys: np.ndarray, nbytes: int, patch: pytest.MonkeyPatch
) -> None:
    """Save pages that are there already, as a second process does that looked before the first one was done."""
    with patch.context() as context:
        context.setattr(Catalog, "resolve", lambda self, index, tag: Locations.none(len(index)))
        assert save(bound, keys, nbytes).all_ok


@contextlib.contextmanager
def saved_twice(path: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[Store, BoundNamespace]]:
    """A store with two copies of the first 20 pages, open for the length of a `with`."""
    with small_store(path) as store:
        bound = opaque(store)
        assert save(bound, KEYS[:20]).all_ok
        save_again(store, bound, KEYS[:20], 8192, patch)
        yield store, bound


@pytest.mark.parametrize("seed", range(12))
def test_any_history_is_recovered(path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves, second copies, deletes, clears, segments given up, restarts."""
    rng = np.random.default_rng(seed)
    truth: dict[str, set[int]] = {pool: set() for pool in SIZES}
    store = small_store(path)
    for _ in range(25):
        pool = str(rng.choice(list(SIZES)))
        bound, nbytes = bounds(store)[pool], SIZES[pool]
        start, count = int(rng.integers(0, 350)), int(rng.integers(1, 50))
        some = (
            np.arange(start, start + count) if rng.random() < 0.7 else rng.choice(400, count, replace=False)
        )
        match rng.choice(["save", "save", "save", "again", "delete", "clear", "restart", "rebuild"]):
            case "save":
                assert save(bound, KEYS[some], nbytes).all_ok
                truth[pool] |= set(some.tolist())
            case "again":
                save_again(store, bound, KEYS[some], nbytes, monkeypatch)
                truth[pool] |= set(some.tolist())
            case "delete":
                assert bound.delete(KEYS[some]).tolist() == [page in truth[pool] for page in some.tolist()]
                truth[pool] -= set(some.tolist())
            case "clear" if rng.random() < 0.3:
                assert bound.clear() == len(truth[pool])
                truth[pool].clear()
            case "restart" | "rebuild" as how:
                store.close()
                if how == "rebuild":
                    forget_catalog(path)
                store = small_store(path)
        for name, bound in bounds(store).items():
            assert np.flatnonzero(bound.contains(KEYS)).tolist() == sorted(truth[name])
    before = {pool: store.catalog.resolve(*_names(bound)) for pool, bound in bounds(store).items()}
    store.close()
    forget_catalog(path)
    with small_store(path) as store:
        assert store.opened.recovered is not None
        assert store.opened.recovered.pages == sum(map(len, truth.values())) == store.catalog.stats()["pages"]
        for pool, bound in bounds(store).items():
            assert np.flatnonzero(bound.contains(KEYS)).tolist() == sorted(truth[pool])
            assert check(bound, KEYS, SIZES[pool]).ok.sum() == len(truth[pool])
            now = store.catalog.resolve(*_names(bound))
            found = now.found
            for name in ("segment", "slot", "generation", "checksum", "payload_bytes"):
                assert np.array_equal(getattr(now, name)[found], getattr(before[pool], name)[found]), name


def _names(bound: BoundNamespace) -> tuple[np.ndarray, np.ndarray]:
    return index_keys(KEYS, bound.digest)


def test_a_deleted_page_does_not_come_back_through_an_older_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(path) as store:
        bound = opaque(store)
        assert save(bound, KEYS).all_ok
        save_again(store, bound, KEYS[100:110], 8192, monkeypatch)
        assert bound.delete(KEYS[95:115]).all()
        assert not bound.contains(KEYS[95:115]).any()
    forget_catalog(path)
    with small_store(path) as store:
        assert np.flatnonzero(~opaque(store).contains(KEYS)).tolist() == list(range(95, 115))


def damage(path: Path, bound: BoundNamespace, keys: np.ndarray) -> None:
    """What the power took with it: payloads whose entries are there."""
    segment, offset = locate(bound, keys)
    for number, at in zip(segment.tolist(), offset.tolist(), strict=True):
        flip(path / "segments" / f"{number:08d}.seg", 8 * (at + 4321))


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_copy_whose_payload_did_not_arrive_gives_way_to_an_older_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """A page that was durable is not lost to somebody who was saving it again when the power went."""
    with small_store(path) as store:
        bound = opaque(store)
        assert save(bound, KEYS).all_ok
        for _ in range(copies):
            save_again(store, bound, KEYS[100:150], 8192, monkeypatch)
            damage(path, bound, KEYS[100:140:3])
        for again in range(3):
            store.close()
            forget_catalog(path)
            store = small_store(path)
            assert store.opened.recovered is not None
            assert store.opened.recovered.pages == len(KEYS) + 5 * again
            bound = opaque(store)
            assert check(bound, KEYS).all_ok, again
            assert save(bound, make_keys(5, again)).all_ok
        store.close()


def test_nothing_older_than_a_deletion_comes_back_for_a_copy_that_did_not_arrive(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved_twice(path, monkeypatch) as (store, bound):
        assert bound.delete(KEYS[:20]).all()
        assert save(bound, KEYS[:20]).all_ok
        damage(path, bound, KEYS[:20])
    forget_catalog(path)
    with small_store(path) as store:
        assert not check(opaque(store), KEYS[:20]).ok.any()


def test_only_copies_that_may_have_been_under_way_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild that read every copy of a large store would keep its server down."""
    really = time.time_ns
    with small_store(path) as store:
        bound = opaque(store)
        with monkeypatch.context() as earlier:
            earlier.setattr("time.time_ns", lambda: really() - 2 * UNSYNCED_NS)
            assert save(bound, KEYS[:20]).all_ok
            save_again(store, bound, KEYS[:20], 8192, monkeypatch)
        save_again(store, bound, KEYS[10:12], 8192, monkeypatch)
        assert save(bound, KEYS[20:40]).all_ok
    asked: list[int] = []
    arrived = Copies.arrived
    monkeypatch.setattr(
        Copies, "arrived", lambda self, entries: (asked.append(len(entries)), arrived(self, entries))[1]
    )
    forget_catalog(path)
    with small_store(path) as store:
        assert check(opaque(store), KEYS[:40]).all_ok
    assert asked == [2]


def test_an_entry_of_a_clock_that_was_ahead_hides_no_copy_that_did_not_arrive(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved_twice(path, monkeypatch) as (store, bound):
        damage(path, bound, KEYS[:20])
        monkeypatch.setattr(store.sequencer, "_last", time.time_ns() + 100 * UNSYNCED_NS)
        assert save(bound, KEYS[20:21]).all_ok
    forget_catalog(path)
    with small_store(path) as store:
        assert check(opaque(store), KEYS[:21]).all_ok


class Broken:
    """Readers of payloads for which the drive, or this machine, fails with the segments of which it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        self.segments: set[int] = set()
        self.asked: list[int] = []
        check = PayloadReader.check

        def fail(reader: PayloadReader, table: Table, *others: Any) -> Any:
            self.asked.append(table.superblock.segment_id)
            if table.superblock.segment_id in self.segments:
                if how == "raises":
                    raise EngineError("refused")
                return np.full(len(others[1]), PageStatus[how], np.uint8)
            return check(reader, table, *others)

        monkeypatch.setattr(PayloadReader, "check", fail)


@pytest.mark.parametrize("how", ["raises", "MISS_SEGMENT", "MISS_DEADLINE"])
def test_a_segment_that_cannot_be_read_hides_no_copy_of_another_that_did_not_arrive(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    volumes = [path, path.with_name("second")]
    broken = Broken(monkeypatch, how)
    with small_store(volumes) as store:
        bound = opaque(store)
        for part in np.split(KEYS, 10):  # on both volumes
            assert save(bound, part).all_ok
        save_again(store, bound, KEYS, 8192, monkeypatch)
        segment, offset = locate(bound, KEYS)
        rows = {row.segment_id: row.volume for row in store._segments()}
        on = np.array([rows[each] for each in segment.tolist()])
        assert len(set(on.tolist())) == 2
        for number, at, volume in zip(segment.tolist(), offset.tolist(), on.tolist(), strict=True):
            flip(volumes[volume] / "segments" / f"{number:08d}.seg", 8 * (at + 4321))
        last = int(segment[-1])  # asked first
        silent = on == rows[last] if how == "MISS_DEADLINE" else segment == last
        broken.segments = set(segment[silent].tolist())
    forget_catalog(path)
    with small_store(volumes) as store:
        result = check(opaque(store), KEYS)
        assert result.ok[~silent].all()
        assert not result.ok[silent].any()
    if how == "MISS_DEADLINE":
        assert len(set(broken.asked) & broken.segments) == 1, "a drive that does not answer is asked once"
    shutil.rmtree(volumes[1])


def test_a_copy_that_the_drive_cannot_read_gives_way_to_an_older_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was being written when the power went may be unreadable."""
    with saved_twice(path, monkeypatch) as (store, bound):
        newer, offset = locate(bound, KEYS[:20])
    broken = Broken(monkeypatch, "MISS_IO")
    broken.segments = set(newer.tolist())
    forget_catalog(path)
    with small_store(path) as store:
        assert not np.isin(locate(opaque(store), KEYS[:20])[1], offset).any()
        assert check(opaque(store), KEYS[:20]).all_ok


def test_so_many_copies_that_reading_them_takes_long_keep_nobody_from_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved_twice(path, monkeypatch) as (store, bound):
        damage(path, bound, KEYS[:20])
    forget_catalog(path)
    monkeypatch.setattr("gdsstore.verify.copies.TIME_S", 0.0)
    with small_store(path) as store:
        assert opaque(store).contains(KEYS[:20]).all()
        assert not check(opaque(store), KEYS[:20]).ok.any()


def test_a_segment_counts_though_the_other_volume_has_a_file_of_its_name(path: Path) -> None:
    volumes = [path, path.with_name("second")]
    with small_store(volumes) as store:
        for part in np.split(KEYS, 10):
            assert save(opaque(store), part).all_ok
    for here, there in (volumes, volumes[::-1]):
        for file in sorted((here / "segments").glob("*.seg")):
            if not (there / "segments" / file.name).exists():
                (there / "segments" / file.name).write_bytes(b"not a segment")
    forget_catalog(path)
    with small_store(volumes) as store:
        assert check(opaque(store), KEYS).all_ok
        recovered = store.opened.recovered
        assert recovered is not None
        assert recovered.left_out == []
        assert len(recovered.problems) == len(store._segments())
    shutil.rmtree(volumes[1])


def test_a_drive_that_does_not_say_whether_a_copy_arrived_keeps_nobody_from_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved_twice(path, monkeypatch):
        pass
    forget_catalog(path)
    monkeypatch.setattr(
        "gdsstore.verify.copies.PosixEngine",
        lambda threads: FaultyEngine(PosixEngine(threads), [Fault(FaultKind.HANG)], 0),
    )
    with small_store(path, io_deadline_s=0.1) as store:
        assert opaque(store).contains(KEYS[:20]).all()


def test_after_reclaims_a_rebuild_finds_at_least_what_was_there_and_nothing_wrong(path: Path) -> None:
    with small_store(path, capacity="16MiB") as store:
        for turn in range(12):
            assert save(opaque(store), make_keys(200, turn)).all_ok
        assert store.stats()["pages_reclaimed"] > 0
        there = [opaque(store).contains(make_keys(200, turn)) for turn in range(12)]
    forget_catalog(path)
    with small_store(path, capacity="16MiB") as store:
        for turn in range(12):
            found = check(opaque(store), make_keys(200, turn)).ok
            assert not (there[turn] & ~found).any()


def test_a_segment_goes_on_being_filled_where_it_was_left(path: Path) -> None:
    with small_store(path) as store:
        assert save(opaque(store), KEYS[:50]).all_ok
    for turn in range(3):
        forget_catalog(path)
        with small_store(path) as store:
            assert save(opaque(store), KEYS[50 + 10 * turn : 60 + 10 * turn]).all_ok
            assert store.stats()["segments"]["open"] == len(list((path / "segments").iterdir())) == 1
    with small_store(path) as store:
        assert check(opaque(store), KEYS[:80]).all_ok


def test_segment_ids_go_on_behind_the_largest_that_is_there(path: Path) -> None:
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
        names = {file.name for file in (path / "segments").iterdir()}
    forget_catalog(path)
    with small_store(path) as store:
        assert save(opaque(store), make_keys(400, "more")).all_ok
        assert check(opaque(store), KEYS).all_ok
    new = {file.name for file in (path / "segments").iterdir()} - names
    assert new
    assert min(new) > max(names)


BAD_ENTRIES = {
    "another generation": {"generation": 8},
    "another segment": {"segment_id": 4},
    "another slot": {"slot": 2},
    "more bytes than a slot has": {"payload_bytes": 8193},
    "flags of the future only": {"flags": 4},
}


@pytest.mark.parametrize("what", BAD_ENTRIES)
def test_intact_entries_that_do_not_belong_where_they_lie_are_not_believed(tmp_path: Path, what: str) -> None:
    volume = Volume(0, tmp_path / "v")
    volume.prepare()
    uuid, geometry = b"u" * 16, Geometry.of(1 << 20, 8192)
    volume.create_segment(Superblock(uuid, 3, 7, geometry))
    entries = np.zeros(2, ENTRY)
    entries["generation"], entries["segment_id"], entries["slot"], entries["flags"] = 7, 3, [0, 1], 1
    for name, value in BAD_ENTRIES[what].items():
        entries[name][1] = value
    with volume.table(3) as fd:
        write_entries(fd, 0, seal_entries(entries, entry_salt(uuid)))
    found = scan_segment(volume, 3, uuid, 1 << 20)
    assert not found.problem
    assert found.row.state is SegmentState.OPEN
    if what == "flags of the future only":
        # It is ours and holds its slot, but is no page that this version knows.
        assert found.row.filled == 2
    else:
        assert found.row.filled == 1
        assert found.entries is not None
        assert found.entries["slot"].tolist() == [0]
    foreign = scan_segment(volume, 3, b"x" * 16, 1 << 20)
    assert foreign.row.state is SegmentState.LOST
    assert "another store" in foreign.problem

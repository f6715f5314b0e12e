"""Files that are lost, cut or exchanged under an open store, or while it is closed: misses, never wrong bytes, never a crash."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import GdsStoreError, PageStatus, Store
from gdsstore.catalog.index import Catalog
from gdsstore.errors import StoreError
from tests.store.helpers import (
    check,
    flip,
    forget_catalog,
    locate,
    logged,
    make_keys,
    opaque,
    physical_bytes,
    save,
    segments,
    small_store,
    statuses,
    truth,
)

PAGE = 8192
IN_A_SEGMENT = 125
KEYS = make_keys(4 * IN_A_SEGMENT)  # four full segments
SECOND = np.arange(len(KEYS)) // IN_A_SEGMENT == 1


def filled(path: Path) -> Path:
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
        assert np.array_equal(locate(opaque(store), KEYS)[0] == 1, SECOND)
    return path


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    return filled(tmp_path / "s")


def foreign(path: Path) -> None:
    """The same segment of another store, where these very keys have other pages."""
    other = path.parent.parent.parent / uuid.uuid4().hex
    with small_store(other) as store:
        assert opaque(store).save(KEYS, ~truth(KEYS, PAGE)).result(60).all_ok
    shutil.copyfile(other / "segments" / path.name, path)


def link(path: Path) -> None:
    target = path.parent.parent.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "deleted": os.unlink,
    "emptied": lambda p: os.truncate(p, 0),
    "cut inside the table": lambda p: os.truncate(p, 5000),
    "cut before its pages": lambda p: os.truncate(p, 16384),
    "a foreign segment": foreign,
    "zeros": lambda p: p.write_bytes(bytes(1 << 20)),
    "noise": lambda p: p.write_bytes(os.urandom(1 << 20)),
    "a link": link,
    "another of our segments": lambda p: shutil.copyfile(p.with_name("00000002.seg"), p),
    "a directory": lambda p: (p.unlink(), p.mkdir()),
}


def second(path: Path) -> Path:
    return path / "segments" / "00000001.seg"


def goes_on(store: Store, path: Path) -> None:
    """After the damage: the other pages are there, new ones are taken, and the damaged file is not touched again."""
    namespace = opaque(store)
    assert check(namespace, KEYS[~SECOND]).all_ok
    assert not check(namespace, KEYS[SECOND]).ok.any()
    assert not namespace.contains(KEYS[SECOND]).any()
    assert save(namespace, KEYS[SECOND]).count(PageStatus.SAVED) == IN_A_SEGMENT
    assert check(namespace, KEYS).all_ok


@pytest.mark.parametrize("rebuilt", [False, True], ids=["catalog kept", "catalog lost"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_segment_that_was_damaged_while_the_store_was_closed(
    closed: Path, damage: str, rebuilt: bool, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[damage](second(closed))
    if rebuilt:
        forget_catalog(closed)
    with small_store(closed) as store:
        result = check(opaque(store), KEYS)
        assert np.array_equal(result.ok, ~SECOND)
        if not (
            rebuilt and damage in ("deleted", "a link", "a directory")
        ):  # nothing there is left to say it
            assert "00000001.seg" in logged(caplog.records)
        goes_on(store, closed)
    forget_catalog(closed)
    with small_store(closed) as store:
        assert check(opaque(store), KEYS).all_ok


@pytest.mark.parametrize("used_before", [False, True], ids=["file not open", "file open"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_segment_that_is_damaged_under_an_open_store(closed: Path, damage: str, used_before: bool) -> None:
    with small_store(closed) as store:
        namespace = opaque(store)
        if used_before:
            assert check(namespace, KEYS).all_ok
        DAMAGE[damage](second(closed))
        result = check(namespace, KEYS)
        assert result.ok[~SECOND].all()
        if not (
            used_before and damage in ("deleted", "a link", "a directory")
        ):  # the open file is the good one still
            assert not result.ok[SECOND].any()
            goes_on(store, closed)
        namespace.delete(KEYS[SECOND])
        assert not namespace.contains(KEYS[SECOND]).any()
    with small_store(closed) as store:
        assert check(opaque(store), KEYS[~SECOND]).all_ok


def test_a_foreign_segment_is_counted_and_never_written_to(closed: Path) -> None:
    foreign(second(closed))
    before = second(closed).read_bytes()
    with small_store(closed, capacity="20MiB") as store:
        namespace = opaque(store)
        for turn in range(30):  # every segment of ours is reclaimed and used again
            assert save(namespace, make_keys(IN_A_SEGMENT, turn)).all_ok
        assert store.stats()["segments_reclaimed"] > 10
        assert store.stats()["segments"]["lost"] == 1
        assert physical_bytes(closed) <= store.capacity_bytes
    assert second(closed).read_bytes() == before


def test_a_foreign_segment_in_the_place_of_a_partly_filled_one_is_not_filled_up(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        with small_store(path) as store:
            content = truth(KEYS[:20], PAGE) ^ np.uint8(path is paths[1])
            assert opaque(store).save(KEYS[:20], content).result(60).all_ok
    file = segments(paths[0])[0]
    shutil.copyfile(segments(paths[1])[0], file)
    before = file.read_bytes()
    with small_store(paths[0]) as store:
        assert save(opaque(store), KEYS[20:60]).all_ok
        assert check(opaque(store), KEYS[20:60]).all_ok
        assert not check(opaque(store), KEYS[:20]).ok.any()
    assert file.read_bytes() == before


def test_space_of_segments_that_were_deleted_under_an_open_store_comes_back(closed: Path) -> None:
    with small_store(closed, capacity="16MiB") as store:
        namespace = opaque(store)
        for turn in range(20):
            save(namespace, make_keys(IN_A_SEGMENT, turn))
        for file in segments(closed):
            file.unlink()
        for turn in range(100, 130):
            save(namespace, make_keys(IN_A_SEGMENT, turn))
        assert save(namespace, make_keys(IN_A_SEGMENT, 200)).all_ok
        assert check(namespace, make_keys(IN_A_SEGMENT, 200)).all_ok
        assert physical_bytes(closed) <= store.capacity_bytes


def test_segments_that_came_back_are_free_space_again(closed: Path, tmp_path: Path) -> None:
    """What an open store gave up, and what a catalog does not know, holds nothing that counts."""
    second(closed).rename(tmp_path / "away")
    with small_store(closed) as store:
        assert check(opaque(store), KEYS).count(PageStatus.MISS_ABSENT) == IN_A_SEGMENT
    (tmp_path / "away").rename(second(closed))
    with small_store(closed) as store:
        assert not opaque(store).contains(KEYS[SECOND]).any()
        assert store.stats()["segments"]["free"] == 1
        assert save(opaque(store), KEYS[SECOND]).all_ok
        assert check(opaque(store), KEYS).all_ok


def test_a_segment_on_two_volumes_is_used_once(tmp_path: Path) -> None:
    volumes = [tmp_path / "a", tmp_path / "b"]
    with small_store(volumes) as store:
        for turn in range(4):
            assert save(opaque(store), KEYS[turn * 125 : turn * 125 + 125]).all_ok
    for file in segments(volumes[0]):
        shutil.copyfile(file, volumes[1] / "segments" / file.name)
    for keep in (True, False):
        if not keep:
            forget_catalog(volumes[0])
        with small_store(volumes) as store:
            assert check(opaque(store), KEYS).all_ok


@pytest.mark.parametrize("volumes", [1, 2])
def test_an_open_store_whose_directory_is_removed_goes_on_with_what_it_has_open(
    tmp_path: Path, closed: Path, volumes: int
) -> None:
    if volumes == 2:
        shutil.rmtree(closed)
        with small_store([closed, tmp_path / "second"]) as store:
            assert save(opaque(store), KEYS).all_ok
    with small_store(closed) as store:
        namespace = opaque(store)
        assert check(namespace, KEYS).all_ok
        for volume in store.volumes:
            shutil.rmtree(volume.path)
        assert check(namespace, KEYS).all_ok
        result = save(namespace, make_keys(400, "more"))
        assert not result.all_ok
        assert np.array_equal(check(namespace, make_keys(400, "more")).ok, result.ok)
        store.upkeep.turn()
    assert not closed.exists()


def test_a_file_in_place_of_the_segments_directory_is_an_error(closed: Path) -> None:
    shutil.rmtree(closed / "segments")
    (closed / "segments").write_bytes(b"")
    with pytest.raises(GdsStoreError, match="segments"):
        small_store(closed)


def test_loads_go_on_where_the_catalog_cannot_be_written(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage is then found again and again, but costs no page beside it, and no error."""
    with small_store(closed) as store:
        namespace = opaque(store)
        segment, offset = locate(namespace, KEYS)
        flip(closed / "segments" / f"{segment[3]:08d}.seg", int(offset[3]) * 8)

        def full(*_: object, **__: object) -> None:
            raise StoreError("no room for the catalog to grow", errno=28)

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "_allocate", full)
            for _ in range(2):
                result = check(namespace, KEYS)
                assert [i for i, status in enumerate(statuses(result)) if status != "LOADED"] == [3]
                assert result.status[3] == PageStatus.MISS_CHECKSUM
            more = make_keys(200, "more")
            assert save(namespace, more).reasons() == {"FAILED_NO_SPACE": 200}
            assert not namespace.contains(more).any()
            with pytest.raises(StoreError):
                namespace.delete(KEYS[:1])
        assert check(namespace, KEYS).count(PageStatus.MISS_CHECKSUM) == 1
        assert save(namespace, more).all_ok
        assert check(namespace, more).all_ok

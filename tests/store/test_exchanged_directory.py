"""A store directory that is deleted and made anew under an open store: neither gets the other's bytes, nor loses any to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gdsstore import Store, StoreError
from tests.store.helpers import check, forget_catalog, make_keys, opaque, save, small_store

OURS, THEIRS = make_keys(120, "ours"), make_keys(600, "theirs")


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store, of other pages in the same namespaces."""
    path = tmp_path_factory.mktemp("another") / "s"
    with small_store(path) as store:
        for bound, nbytes in ((opaque(store), 8192), (opaque(store, 20_000), 20_000)):
            assert save(bound, THEIRS, nbytes).all_ok
    return path


def is_whole(path: Path) -> None:
    for _ in range(2):
        with small_store(path) as store:
            assert check(opaque(store), THEIRS).all_ok
            assert check(opaque(store, 20_000), THEIRS, 20_000).all_ok
        forget_catalog(path)


def keep_open(store: Store, files: int) -> None:
    store.moving().files._max_open = files  # of many segments, not all files are open


def saves_into_what_it_fills(store: Store) -> None:
    save(opaque(store), make_keys(20, "more"))
    save(opaque(store, 20_000), make_keys(20, "more"), 20_000)


def saves_more_than_that(store: Store) -> None:
    for turn in range(4):
        save(opaque(store), make_keys(200, turn))


def loads(store: Store) -> None:
    check(opaque(store), OURS)
    check(opaque(store, 20_000), OURS[:20], 20_000)


def deletes(store: Store) -> None:
    assert opaque(store).delete(OURS).any()


def clears(store: Store) -> None:
    with pytest.raises(StoreError, match="another store"):
        opaque(store).clear()


def shrinks(store: Store) -> None:
    store.reclaimer.capacity_bytes = 2 << 20
    for _ in range(20):
        store.reclaimer.shrink()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "does", [saves_into_what_it_fills, saves_more_than_that, loads, deletes, clears, shrinks]
)
def test_a_store_that_was_deleted_under_its_user_does_no_harm_to_the_next_one(
    tmp_path: Path, another: Path, does: Callable[[Store], None], verify: bool
) -> None:
    path = tmp_path / "s"
    with small_store(path, verify=verify) as store:
        keep_open(store, 1)
        assert save(opaque(store), OURS).all_ok
        assert save(opaque(store, 20_000), OURS[:20], 20_000).all_ok
        assert check(opaque(store), OURS).all_ok
        assert check(opaque(store, 20_000), OURS[:20], 20_000).all_ok
        shutil.rmtree(path)
        shutil.copytree(another, path)
        does(store)
        store.upkeep.turn()
        loads(store)
    is_whole(path)


def test_segments_of_two_stores_that_were_exchanged_are_never_read_as_each_others(tmp_path: Path) -> None:
    """Not even where nobody compares checksums."""
    for name, keys in (("one", OURS), ("two", OURS[::-1])):
        with small_store(tmp_path / name) as store:
            assert save(opaque(store), keys).all_ok
    files = [tmp_path / name / "segments" / "00000000.seg" for name in ("one", "two")]
    content = files[0].read_bytes()
    shutil.copyfile(files[1], files[0])
    files[1].write_bytes(content)
    for name in ("one", "two"):
        with small_store(tmp_path / name, verify=False) as store:
            assert not check(opaque(store), OURS).ok.any()
            assert not opaque(store).contains(OURS).any(), "the segment is given up"
            assert save(opaque(store), OURS).all_ok
            assert check(opaque(store), OURS).all_ok


def test_a_segment_whose_file_was_exchanged_while_it_is_filled_is_not_written_to(tmp_path: Path) -> None:
    """Moved to another drive and back, say: what goes into the copy would have no entry in the table that we write."""
    path = tmp_path / "s"
    with small_store(path) as store:
        keep_open(store, 1)
        assert save(opaque(store), OURS).all_ok
        assert save(opaque(store, 20_000), OURS[:20], 20_000).all_ok
        for file in sorted((path / "segments").glob("*.seg")):
            shutil.copyfile(file, file.with_suffix(".copy"))
            file.with_suffix(".copy").rename(file)
        more = make_keys(20, "more")
        result = save(opaque(store), more)
        assert np.array_equal(check(opaque(store), more).ok, result.ok)
        again = save(opaque(store), more)
        assert again.all_ok, "it goes on in another one"
        store.close()
    with small_store(path) as store:
        assert check(opaque(store), more).all_ok

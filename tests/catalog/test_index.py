"""The catalog answers as a dictionary would, whichever way it finds the answer."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsstore.catalog.index import Catalog
from gdsstore.catalog.records import EXTENT_PAGES, SegmentRow, SegmentState
from gdsstore.errors import StoreDamagedError, StoreError
from tests.catalog.model import Model, names, places, run_of, slots

MAP_BYTES = 64 << 20
NAMESPACES = (b"a" * 16, b"b" * 16)


def fresh(directory: Path) -> Catalog:
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    return Catalog(directory, MAP_BYTES)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    made = fresh(tmp_path / "catalog")
    yield made
    made.close()


def agree(catalog: Catalog, model: Model, numbers: list[int]) -> None:
    index, tag = names(numbers)
    assert places(catalog.resolve(index, tag)) == model.answers(numbers, prefix=False)
    for prefix in (False, True):
        assert slots(catalog.present(index, tag, prefix=prefix)) == [
            answer and answer[:2] for answer in model.answers(numbers, prefix=prefix)
        ]
    one_by_one = [places(catalog.resolve(index[i : i + 1], tag[i : i + 1]))[0] for i in range(len(numbers))]
    assert one_by_one == model.answers(numbers, prefix=False)


numbers = st.integers(0, 150)
runs = st.one_of(
    st.builds(lambda start, count: list(range(start, start + count)), numbers, st.integers(1, 130)),
    st.lists(numbers, min_size=1, max_size=12, unique=True),
)
questions = st.one_of(runs, st.lists(st.integers(0, 300), max_size=30))
operations = st.one_of(
    st.tuples(st.just("commit"), st.integers(0, 3), runs),
    st.tuples(st.just("remove"), st.just(0), questions),
    st.tuples(st.just("drop"), st.integers(0, 3), st.just([])),
    st.tuples(st.just("look up"), st.just(0), questions),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(operations, min_size=1, max_size=12), questions)
def test_look_ups_answer_as_a_dictionary_does(
    tmp_path: Path, history: list[tuple[str, int, list[int]]], last: list[int]
) -> None:
    """Runs that overwrite each other in part, removed pages, dropped segments, questions with holes in them."""
    catalog, model = fresh(tmp_path / "catalog"), Model()
    filled, generation = [0] * 4, [1] * 4
    try:
        for name, segment, pages in history:
            if name == "commit":
                with catalog.write(pages=len(pages)) as txn:
                    run = run_of(pages, segment, filled[segment], generation[segment])
                    catalog.commit(txn, NAMESPACES[segment % 2], [run])
                model.commit(pages, segment, filled[segment], generation[segment])
                filled[segment] += len(pages)
            elif name == "remove":
                index, tag = names(pages)
                with catalog.write(pages=len(pages)) as txn:
                    gone = catalog.remove(txn, catalog.resolve(index, tag), index)
                expected = [model.pages.pop(page, None) is not None for page in pages]
                assert gone.tolist() == expected
            elif name == "drop":
                with catalog.write(pages=filled[segment]) as txn:
                    assert catalog.drop_pages(txn, segment) == model.drop_segment(segment)
                filled[segment], generation[segment] = 0, generation[segment] + 1
            else:
                agree(catalog, model, pages)
        agree(catalog, model, last)
        agree(catalog, model, list(range(300)))
        with catalog.read() as txn:
            assert (
                sum(catalog.pages_by_namespace(txn).values()) == len(model.pages) == catalog.stats()["pages"]
            )
    finally:
        catalog.close()


def test_a_page_that_was_saved_twice_is_deleted_once_and_for_all(catalog: Catalog) -> None:
    """Two processes may save the same page; the extent of the first copy must not bring it back."""
    with catalog.write() as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1, 2, 3], 0, 0, 1)])
        catalog.commit(txn, NAMESPACES[0], [run_of([2], 1, 0, 1)])
    index, tag = names([1, 2, 3])
    with catalog.write() as txn:
        assert catalog.remove(txn, catalog.resolve(index, tag), index).tolist() == [True, True, True]
    assert not catalog.resolve(index, tag).found.any()


def test_dropping_the_newer_copy_of_a_page_loses_it_and_does_not_point_anywhere_else(
    catalog: Catalog,
) -> None:
    with catalog.write() as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1, 2, 3], 0, 0, 1)])
        catalog.commit(txn, NAMESPACES[0], [run_of([2], 1, 0, 1)])
        assert catalog.drop_pages(txn, 1) == 1
    assert catalog.resolve(*names([1, 2, 3])).found.tolist() == [True, False, True]
    assert catalog.resolve(*names([2])).found.tolist() == [False]


@pytest.mark.parametrize("length", [1, EXTENT_PAGES - 1, EXTENT_PAGES, EXTENT_PAGES + 1, 5 * EXTENT_PAGES])
def test_runs_of_any_length_are_found_whole_and_from_any_start(catalog: Catalog, length: int) -> None:
    model = Model()
    pages = list(range(length))
    with catalog.write(pages=length) as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of(pages, 2, 37, 5)])
    model.commit(pages, 2, 37, 5)
    for start in {0, 1, length // 2, length - 1}:
        agree(catalog, model, pages[start:])
        agree(catalog, model, [*pages[start:], 1000, *pages])


def test_a_page_of_equal_index_and_other_tag_is_a_miss(catalog: Catalog) -> None:
    with catalog.write() as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1, 2], 0, 0, 1)])
    index, tag = names([1, 2])
    for prefix in (False, True):
        assert not catalog.present(index, tag + np.uint64(1), prefix=prefix).found.any()
        wrong_second = tag + np.array([0, 1], np.uint64)
        assert catalog.present(index, wrong_second, prefix=prefix).found.tolist() == [True, False]
    assert catalog.resolve(index, wrong_second).found.tolist() == [True, False]


def test_clearing_one_namespace_of_a_segment_leaves_the_other(catalog: Catalog) -> None:
    with catalog.write() as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of(list(range(70)), 0, 0, 1)])
        catalog.commit(txn, NAMESPACES[1], [run_of(list(range(100, 110)), 0, 70, 1)])
        assert catalog.drop_pages(txn, 0, NAMESPACES[0]) == 70
        assert catalog.pages_by_namespace(txn) == {NAMESPACES[1]: 10}
    assert not catalog.resolve(*names(range(70))).found.any()
    assert catalog.resolve(*names(range(100, 110))).found.all()


def test_a_removal_does_not_hit_a_page_that_was_saved_anew_meanwhile(catalog: Catalog) -> None:
    index, tag = names([1])
    with catalog.write() as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1], 0, 0, 1)])
    before = catalog.resolve(index, tag)
    with catalog.write() as txn:  # reclaimed and used again: same slot, other generation
        catalog.drop_pages(txn, 0)
        catalog.commit(txn, NAMESPACES[0], [run_of([1], 0, 0, 2)])
    with catalog.write() as txn:
        assert catalog.remove(txn, before, index).tolist() == [False]
    assert catalog.resolve(index, tag).found.all()


def test_a_location_without_its_segment_is_a_miss(catalog: Catalog) -> None:
    row = SegmentRow(0, 0, SegmentState.SEALED, 8192, 125, 1, 125)
    with catalog.write() as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1], 0, 0, 1), run_of([2], 9, 0, 1)])
        catalog.put_segment(txn, row)
    where, rows = catalog.locate(*names([1, 2]))
    assert where.found.tolist() == [True, False]
    assert rows == {0: row}


def test_segment_ids_are_never_given_twice_but_one_that_came_to_nothing_goes_back(catalog: Catalog) -> None:
    """A full drive must not use ids up: there are 2^18."""

    def next_id() -> int:
        with catalog.write() as txn:
            return catalog.next_segment_id(txn)

    assert [next_id() for _ in range(3)] == [0, 1, 2]
    with catalog.write() as txn:
        catalog.put_segment(txn, SegmentRow(2, 0, SegmentState.FREE, 0, 0, 1, 0))
        catalog.forget_segment(txn, 2)
    assert next_id() == 3
    with catalog.write() as txn:
        catalog.return_segment_id(txn, 3)
    assert next_id() == 3
    assert next_id() == 4
    with catalog.write() as txn:
        catalog.return_segment_id(txn, 3)  # not the last one: it stays used
    assert next_id() == 5
    with catalog.write() as txn:
        assert catalog.next_segment_id(txn, 100) == 100
    assert next_id() == 101


def test_a_failed_transaction_changes_nothing(catalog: Catalog) -> None:
    with pytest.raises(KeyError), catalog.write() as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1], 0, 0, 1)])
        raise KeyError
    assert not catalog.resolve(*names([1])).found.any()


def test_a_map_that_is_full_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    catalog = Catalog(tmp_path / "catalog", 1 << 20)
    with pytest.raises(StoreError, match="catalog_map_bytes"):
        for start in range(0, 100_000, 500):
            with catalog.write(pages=500) as txn:
                catalog.commit(txn, NAMESPACES[0], [run_of(range(start, start + 500), 0, start, 1)])
    assert catalog.resolve(*names(range(100))).found.all()
    catalog.close()


def test_a_drive_without_room_is_an_error_before_anything_is_touched(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError) as caught, catalog.write(pages=100_000) as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1], 0, 0, 1)])
    assert caught.value.context["errno"] == errno.ENOSPC
    monkeypatch.undo()
    with catalog.write(pages=100_000) as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of([1], 0, 0, 1)])
    assert catalog.resolve(*names([1])).found.all()


def test_what_a_transaction_may_touch_has_blocks_on_the_drive_and_is_private(
    catalog: Catalog, tmp_path: Path
) -> None:
    """A store into a hole of the mapping would kill the process on a full drive."""
    with catalog.write(pages=20_000) as txn:
        catalog.commit(txn, NAMESPACES[0], [run_of(range(20_000), 0, 0, 1)])
    directory = tmp_path / "catalog"
    data, lock = (directory / name for name in ("data.mdb", "lock.mdb"))
    used = catalog.stats()["used_bytes"]
    with data.open("rb") as file:
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
    assert hole >= used
    assert lock.stat().st_blocks * 512 >= lock.stat().st_size
    assert {stat.S_IMODE(path.stat().st_mode) for path in (data, lock)} == {0o600}
    assert catalog.physical_bytes == (data.stat().st_blocks + lock.stat().st_blocks) * 512


def test_a_catalog_is_its_stores_only_once_it_was_completed(tmp_path: Path) -> None:
    catalog = fresh(tmp_path / "catalog")
    assert not catalog.belongs_to(b"1" * 16)
    catalog.complete(b"1" * 16)
    assert catalog.belongs_to(b"1" * 16)
    assert not catalog.belongs_to(b"2" * 16)
    catalog.close()


@pytest.mark.parametrize("content", [b"not LMDB" * 1024, b"\0" * 8192])
def test_files_that_are_no_catalog_are_a_typed_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "data.mdb").write_bytes(content)
    with pytest.raises(StoreDamagedError, match="catalog"):
        Catalog(tmp_path / "catalog", MAP_BYTES)


def test_a_link_in_place_of_the_catalog_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    target = tmp_path / "elsewhere"
    target.write_bytes(b"")
    (tmp_path / "catalog" / "data.mdb").symlink_to(target)
    with pytest.raises(StoreError):
        Catalog(tmp_path / "catalog", MAP_BYTES)
    assert target.read_bytes() == b""

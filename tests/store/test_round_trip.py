"""What is saved is what is loaded, looked up and deleted; every key gets its own answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gdsstore import BoundNamespace, PageStatus, Pieces, Store
from tests.store.helpers import WAIT_S, check, load, make_keys, opaque, save, small_store, statuses, truth

PAGE = 8192


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "s") as made:
        yield made


@pytest.fixture
def namespace(store: Store) -> BoundNamespace:
    return opaque(store, PAGE)


def test_a_key_that_comes_twice_is_saved_once_and_loaded_twice(namespace: BoundNamespace) -> None:
    keys = make_keys(3)
    twice = keys[[0, 1, 0, 2, 1, 0]]
    assert statuses(save(namespace, twice, PAGE)) == [
        "SAVED",
        "SAVED",
        "ALREADY_THERE",
        "SAVED",
        "ALREADY_THERE",
        "ALREADY_THERE",
    ]
    assert statuses(save(namespace, twice, PAGE)) == ["ALREADY_THERE"] * 6
    assert check(namespace, twice, PAGE).count(PageStatus.LOADED) == 6
    assert namespace.lookup(twice) == 6
    assert namespace.delete(twice).tolist() == [True, True, False, True, False, False]


def test_calls_without_keys_do_nothing(namespace: BoundNamespace) -> None:
    nothing = make_keys(0)
    for keys in (nothing, []):
        assert len(namespace.save(keys, np.zeros((0, PAGE), np.uint8)).result(WAIT_S).status) == 0
        result = namespace.load(keys, Pieces(np.zeros((0, 2), np.uint64), PAGE // 2)).result(WAIT_S)
        assert result.all_ok
        assert result.prefix == 0
        assert namespace.load(keys, []).result(WAIT_S).all_ok
        assert namespace.lookup(keys) == 0
        assert namespace.contains(keys).tolist() == []
        assert namespace.delete(keys).tolist() == []


def test_each_key_gets_its_own_answer(namespace: BoundNamespace) -> None:
    keys = make_keys(6)
    assert save(namespace, keys[[1, 3]], PAGE).all_ok
    result, memory = load(namespace, keys, PAGE)
    assert statuses(result) == [
        "MISS_ABSENT",
        "LOADED",
        "MISS_ABSENT",
        "LOADED",
        "MISS_ABSENT",
        "MISS_ABSENT",
    ]
    assert np.array_equal(memory[result.ok], truth(keys[[1, 3]], PAGE))
    assert (memory[~result.ok] == 0xEE).all()
    assert statuses(save(namespace, keys, PAGE))[:4] == ["SAVED", "ALREADY_THERE", "SAVED", "ALREADY_THERE"]
    assert result.reasons() == {"LOADED": 2, "MISS_ABSENT": 4}
    assert result.prefix == 0
    assert not result.memory_in_use


def test_a_lookup_counts_from_the_start_up_to_the_first_gap(namespace: BoundNamespace) -> None:
    keys = make_keys(200)
    assert save(namespace, keys, PAGE).all_ok
    absent = make_keys(5, "absent")
    assert namespace.lookup(keys) == 200
    assert namespace.lookup(keys[37:]) == 163
    assert namespace.lookup(np.concatenate([keys[:90], absent[:1], keys[90:]])) == 90
    assert namespace.lookup(np.concatenate([absent[:1], keys])) == 0
    mixed = np.concatenate([keys[:3], absent[:2], keys[50:60], absent[2:]])
    assert namespace.contains(mixed).tolist() == [True] * 3 + [False] * 2 + [True] * 10 + [False] * 3


def test_deleted_pages_are_gone_and_can_be_saved_again(namespace: BoundNamespace) -> None:
    keys = make_keys(10)
    assert save(namespace, keys, PAGE).all_ok
    assert namespace.delete(keys[2:4]).tolist() == [True, True]
    assert namespace.lookup(keys) == 2
    assert namespace.contains(keys).sum() == 8
    assert namespace.delete(keys[2:4]).tolist() == [False, False]
    assert check(namespace, keys, PAGE).count(PageStatus.MISS_ABSENT) == 2
    assert save(namespace, keys, PAGE).count(PageStatus.SAVED) == 2
    assert check(namespace, keys, PAGE).all_ok


def test_a_clear_empties_one_namespace_and_no_other(store: Store) -> None:
    one, other = opaque(store, PAGE), opaque(store, PAGE, pool="other")
    keys = make_keys(70)
    assert save(one, keys, PAGE).all_ok
    assert save(other, keys, PAGE).all_ok
    assert one.clear() == 70
    assert one.clear() == 0
    assert not one.contains(keys).any()
    assert check(other, keys, PAGE).all_ok
    assert save(one, keys, PAGE).count(PageStatus.SAVED) == 70


def test_namespaces_do_not_see_each_others_pages(store: Store) -> None:
    keys = make_keys(5)
    bounds = [
        opaque(store, PAGE),
        opaque(store, PAGE, weights="other"),
        opaque(store, 2 * PAGE),
        opaque(store, PAGE - 1),
    ]
    for number, bound in enumerate(bounds):
        nbytes = bound.namespace.layout.page_bytes
        assert not bound.contains(keys).any()
        assert (load(bound, keys, nbytes)[0].status == PageStatus.MISS_ABSENT).all()
        content = np.full((5, nbytes), number, np.uint8)
        assert bound.save(keys, content).result(WAIT_S).count(PageStatus.SAVED) == 5
    for number, bound in enumerate(bounds):
        nbytes = bound.namespace.layout.page_bytes
        result, memory = load(bound, keys, nbytes)
        assert result.all_ok
        assert (memory == number).all()


def test_many_threads_share_a_store(namespace: BoundNamespace) -> None:
    keys = make_keys(400)
    parts = [keys[i : i + 50] for i in range(0, 400, 25)]  # overlapping: some pages are saved by two at once
    futures = [namespace.save(part, truth(part, PAGE)) for part in parts]
    assert all(future.result(WAIT_S).all_ok for future in futures)
    assert namespace.lookup(keys) == 400
    targets = [np.zeros((len(part), PAGE), np.uint8) for part in parts]
    loads = [namespace.load(part, target) for part, target in zip(parts, targets, strict=True)]
    assert all(future.result(WAIT_S).all_ok for future in loads)
    assert all(np.array_equal(target, truth(part, PAGE)) for part, target in zip(parts, targets, strict=True))
    assert namespace.delete(keys).all()
    assert not namespace.contains(keys).any()


@pytest.mark.parametrize("engine", ["auto", "posix"])
@pytest.mark.parametrize("durability", ["none", "interval", "commit"])
def test_every_engine_and_durability_keeps_pages(tmp_path: Path, engine: str, durability: str) -> None:
    keys = make_keys(30)
    for _ in range(2):
        with small_store(tmp_path / "s", engine=engine, durability=durability) as store:
            assert save(opaque(store, PAGE), keys, PAGE).all_ok
            store.sync()
            assert check(opaque(store, PAGE), keys, PAGE).all_ok


def test_without_verification_pages_come_back_too(tmp_path: Path) -> None:
    keys = make_keys(30)
    with small_store(tmp_path / "s", verify=False) as store:
        assert save(opaque(store, PAGE), keys, PAGE).all_ok
        assert check(opaque(store, PAGE), keys, PAGE).all_ok

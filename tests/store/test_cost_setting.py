"""The cost model in a store: it learns from loads and prefills, and cuts look-ups only where it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import ArgumentError, BoundNamespace, CostSetting, PageLayout, Store
from gdsstore.engines.posix import PosixEngine
from gdsstore.engines.throttle import ThrottledEngine
from tests.store.helpers import WAIT_S, load, make_keys, opaque, save, small_store

PAGE_BYTES, TOKENS = 65536, 64
KEYS = make_keys(64)  # 4 MiB
SLOW, FAST = 8e6, 2e9  # bytes a second


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "s"
    with small_store(path) as store:
        assert save(tokens(store), KEYS, PAGE_BYTES).all_ok
    return path


def tokens(store: Store) -> BoundNamespace:
    return store.namespace(model="test", layout=PageLayout.opaque(PAGE_BYTES, page_tokens=TOKENS))


def open_at(path: Path, bytes_s: float, setting: str, **more: Any) -> Store:
    engine = ThrottledEngine(PosixEngine(2), bytes_s)
    return small_store(path, own_engine=engine, cost_model=setting, **more)


def teach(pages: BoundNamespace, times: int = 3) -> None:
    for turn in range(times):
        assert load(pages, KEYS[: 16 + turn], PAGE_BYTES)[0].all_ok


@pytest.fixture(params=["off", "advise"])
def not_enforced(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    with open_at(path, SLOW, request.param, prefill_tokens_s=100_000) as store:
        yield store


def test_a_look_up_is_cut_only_where_that_was_asked_for(not_enforced: Store) -> None:
    pages = tokens(not_enforced)
    teach(pages)
    assert pages.lookup(KEYS) == 64


def test_off_learns_nothing_and_advises_to_load_all(path: Path) -> None:
    with open_at(path, SLOW, "off", prefill_tokens_s=100_000) as store:
        pages = tokens(store)
        teach(pages)
        advice = pages.advise(64)
        assert (advice.load_pages, advice.expected_load_s) == (64, 0.0)
        assert store.cost.setting is CostSetting.OFF
        assert "advised_pages" not in store.stats()


def test_advice_is_counted(path: Path) -> None:
    with open_at(path, SLOW, "advise", prefill_tokens_s=100_000) as store:
        pages = tokens(store)
        teach(pages)
        assert pages.lookup(KEYS) == 64
        stats = store.stats()
        assert stats["advised_pages"] == 64
        assert stats["advised_pages_computed"] > 32


def test_what_a_slow_drive_has_is_not_worth_it_where_the_server_is_fast(path: Path) -> None:
    with open_at(path, SLOW, "enforce", prefill_tokens_s=100_000) as store:
        pages = tokens(store)
        teach(pages)  # a page takes 8 ms to load, and 0.6 ms to compute
        assert pages.lookup(KEYS) < 8
        assert pages.contains(KEYS).all()  # they are there all the same


def test_what_a_fast_drive_has_is_worth_it(path: Path) -> None:
    with open_at(path, FAST, "enforce", prefill_tokens_s=100) as store:
        pages = tokens(store)
        teach(pages)
        for _ in range(
            4
        ):  # each load a few times as large as the last one: further away, predictions are guesses
            found = pages.lookup(KEYS)
            assert load(pages, KEYS[:found], PAGE_BYTES)[0].all_ok
        assert found == 64


def test_the_prefill_rate_is_learned_from_what_the_server_tells(path: Path) -> None:
    with open_at(path, SLOW, "enforce") as store:
        pages = tokens(store)
        teach(pages)
        assert pages.lookup(KEYS) == 64
        assert pages.advise(64).reason == "the prefill rate is not known"
        for _ in range(10):
            store.cost.observe_prefill(100_000, 1.0)
        assert pages.lookup(KEYS) < 8


def test_pages_in_the_host_cache_are_worth_it_whatever_the_drive_does(path: Path) -> None:
    with open_at(path, SLOW, "enforce", prefill_tokens_s=100_000, host_cache="8MiB") as store:
        pages = tokens(store)
        teach(pages)
        warm = pages.prefetch(KEYS[:40])
        assert warm.wait(WAIT_S)
        assert 40 <= pages.lookup(KEYS) < 48


def test_loads_beside_each_other_do_not_make_the_drive_look_slower_than_it_is(path: Path) -> None:
    with open_at(path, 20e6, "advise", prefill_tokens_s=100, workers=4) as store:
        pages = tokens(store)
        memory = np.empty((4, 16, PAGE_BYTES), np.uint8)
        for _ in range(3):
            calls = [pages.load(KEYS[16 * i : 16 * (i + 1)], memory[i]) for i in range(4)]
            assert all(call.result(WAIT_S).all_ok for call in calls)
        alone_s = 16 * PAGE_BYTES / 20e6
        assert pages.advise(16).expected_load_s < 2 * alone_s  # each of them took four times as long


def test_pages_of_no_tokens_are_never_cut_and_nothing_is_advised_for_them(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", cost_model="enforce", prefill_tokens_s=10**9) as store:
        pages = opaque(store)
        assert save(pages, KEYS).all_ok
        assert pages.lookup(KEYS) == 64
        with pytest.raises(ArgumentError, match="page_tokens"):
            pages.advise(64)

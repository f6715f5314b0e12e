"""Closing, clearing, and the metrics of a backend."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cpu_fixtures import MHA, MLA
from sglang.srt.observability.metrics_collector import StorageMetrics

from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind
from tests.sglang_backend.backends import FilledPool, make_keys, saved
from tests.sglang_backend.conftest import Attach
from tests.sglang_backend.drives import Drive, install, waits

PAGES = 8


@pytest.fixture
def filled() -> FilledPool:
    return FilledPool(MHA, "page_first", PAGES)


def test_closing_waits_for_a_call_under_way(
    filled: FilledPool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.DELAY, Op.READ, delay_s=0.4))
    backend = attach(filled)
    saved(backend, filled)
    drive.broken = True
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(backend.batch_get_v1, filled.keys, filled.indices())
        waits(lambda: drive.count > 0)
        backend.close()
        assert reading.result(20) == [True] * PAGES
    assert all(filled.holds_truth())


def test_closing_at_any_moment_is_a_hit_or_a_miss_for_calls_of_other_threads(
    filled: FilledPool, attach: Attach
) -> None:
    backend = attach(filled)
    saved(backend, filled)
    ended = threading.Event()

    def use() -> set[tuple[Any, ...]]:
        seen = set()
        while not ended.is_set():
            seen.add(tuple(backend.batch_get_v1(filled.keys, filled.indices())))
            seen.add((backend.batch_exists(filled.keys),))
        return seen

    with ThreadPoolExecutor(2) as threads:
        using = [threads.submit(use) for _ in range(2)]
        waits(lambda: any(filled.holds_truth()))
        backend.close()
        ended.set()
        seen = set().union(*(each.result(20) for each in using))
    assert seen <= {(True,) * PAGES, (False,) * PAGES, (PAGES,), (0,)}
    assert (True,) * PAGES in seen


def test_a_closed_backend_finds_and_stores_nothing(filled: FilledPool, attach: Attach) -> None:
    backend = attach(filled)
    saved(backend, filled)
    backend.close()
    backend.close()
    page = filled.pool.get_dummy_flat_data_page()
    assert backend.batch_exists(filled.keys) == 0
    assert backend.batch_exists_v2(filled.keys, [filled.transfer("kv")]).kv_hit_pages == 0
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [False] * PAGES
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [False] * PAGES
    assert backend.batch_get_v2([filled.transfer("kv")]) == {"kv": [False] * PAGES}
    assert backend.batch_set_v2([filled.transfer("kv")]) == {"kv": [False] * PAGES}
    assert backend.exists(filled.keys[0]) is False
    assert backend.get(filled.keys[0], page) is None
    assert backend.set(filled.keys[0], page) is False
    assert backend.clear() is False
    assert backend.get_stats() is None


def test_metrics_are_handed_out_once_and_only_if_they_are_on(filled: FilledPool, attach: Attach) -> None:
    silent = attach(filled)
    saved(silent, filled)
    assert silent.get_stats() is None
    silent.close()
    backend = attach(filled, facts={"enable_storage_metrics": True})
    assert backend.get_stats() == StorageMetrics()
    fresh = make_keys(PAGES)
    backend.batch_set_v1(fresh, filled.indices())
    backend.batch_set_v1(fresh, filled.indices())  # stored already: nothing is written
    backend.batch_get_v1(fresh, filled.indices())
    backend.batch_get_v1([*filled.keys[:3], *make_keys(5)], filled.indices())
    backend.batch_get_v1(make_keys(PAGES), filled.indices())  # nothing moved: nothing to observe
    stats = backend.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([PAGES], [PAGES, 3])
    assert len(stats.backup_bandwidth) == 1
    assert len(stats.prefetch_bandwidth) == 2
    assert all(0 < rate < 1000 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert backend.get_stats() == StorageMetrics()


def test_observations_that_nobody_fetches_do_not_pile_up(filled: FilledPool, attach: Attach) -> None:
    backend = attach(filled, facts={"enable_storage_metrics": True})
    for _ in range(5000):
        backend._stats.loaded(1, 4096, 0.1)
        backend._stats.saved(1, 4096, 0.0)
    stats = backend.get_stats()
    assert len(stats.prefetch_pgs) == len(stats.prefetch_bandwidth) < 5000
    assert len(stats.backup_pgs) == len(stats.backup_bandwidth) < 5000


def test_clear_drops_this_servers_pages_and_no_others(filled: FilledPool, attach: Attach) -> None:
    swa = FilledPool(MLA, "page_first", 2)
    backend, neighbour = attach(filled, ("swa", swa)), attach(filled, weights="other")
    saved(backend, filled)
    backend.batch_set_v2([swa.transfer("swa")])
    backend.set(filled.keys[0], filled.truth[0].view(filled.pool.dtype))
    assert neighbour.batch_set_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert backend.clear() is True
    for _ in range(2):
        assert backend.batch_exists(filled.keys) == 0
        assert backend.batch_get_v1(filled.keys, filled.indices()) == [False] * PAGES
        assert backend.batch_get_v2([swa.transfer("swa")]) == {"swa": [False] * 2}
        assert neighbour.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES
        for each in (backend, neighbour):
            each.close()
        backend, neighbour = attach(filled, ("swa", swa)), attach(filled, weights="other")
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert backend.batch_exists(filled.keys) == PAGES

"""With a host cache, the pages of a request that waits are on their way before its load begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_fixtures import MHA, PAGE_SIZE, linker_request
from kits import LinkerRoundTrip, LinkerUnderTest
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.test_utils import CustomTestCase

from gdsstore import LoadResult, PageStatus, Prefetch
from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind
from sglang_backend import linker_prefetch
from sglang_backend.linker_pools import StoredPool
from sglang_backend.linker_prefetch import Prefetched, Prefetches
from tests.sglang_backend.drives import Drive, install, waits
from tests.sglang_linker.linkers import extra_config
from tests.sglang_linker.test_sidecars import SidecarRoundTrip
from tests.sglang_linker.tree import PAGES, TOKENS, Tree, equal, keys_of, tree_of
from tests.sglang_server.stored import damage

# What is saved does not stay in the host cache, so that what is there was prefetched.
HOST_CACHE = {"host_cache": "32MiB", "write_policy": "never"}


@pytest.fixture(params=["rust", "python"])
def core(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bytes_read(tree: Tree) -> int:
    return int(tree.linker._store.stats().get("drive_bytes_read", 0))


def wait_for_prefetch(tree: Tree, pages: int = PAGES) -> None:
    waits(lambda: tree.linker.prefetches.pages_brought >= pages)


# --- on SGLang's tree ---


def test_a_waiting_requests_pages_are_brought_once_and_its_load_finds_them(core: str, tmp_path: Path) -> None:
    with tree_of(MHA, core, tmp_path, **HOST_CACHE) as tree:
        expected = tree.compute(5000)
        tree.flush()
        request = linker_request()
        for _ in range(20):
            assert tree.stored_tokens(5000, request=request) == TOKENS
            tree.linker.lookups.clear()  # as if the remembered answer was too old
        wait_for_prefetch(tree)
        assert (tree.linker.prefetches.requests, tree.linker.prefetches.pages_asked) == (1, PAGES)
        before = bytes_read(tree)
        assert equal(tree.load(5000, request=request), expected)
        assert bytes_read(tree) == before
        assert tree.linker.loads.pages_warm == PAGES


def test_pages_that_the_device_got_meanwhile_are_left_out(core: str, tmp_path: Path) -> None:
    head = 4 * PAGE_SIZE
    with tree_of(MHA, core, tmp_path, **HOST_CACHE) as tree:
        expected = tree.compute(5000)
        tree.flush()
        request = linker_request()
        tree.stored_tokens(5000, request=request)
        wait_for_prefetch(tree)
        tree.insert(5000, tree.allocator.alloc(head))
        before = bytes_read(tree)
        assert equal(tree.load(5000, request=request), [layer[head:] for layer in expected])
        assert bytes_read(tree) == before


def test_a_load_reads_itself_what_the_prefetch_has_not_brought(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.HANG, Op.READ, limit=1))
    with tree_of(MHA, core, tmp_path, **HOST_CACHE) as tree:
        expected = tree.compute(5000)
        tree.flush()
        drive.broken = True
        request = linker_request()
        tree.stored_tokens(5000, request=request)
        waits(lambda: drive.count == 1)  # the prefetch is under way, and stuck
        drive.broken = False
        assert equal(drive.returns(lambda: tree.load(5000, request=request)), expected)
        assert tree.linker.prefetches.pages_brought == 0
        drive.let_go()


def test_a_damaged_page_that_the_prefetch_meets_fails_no_request(core: str, tmp_path: Path) -> None:
    bad = 7
    with tree_of(MHA, core, tmp_path, **HOST_CACHE) as tree:
        expected = tree.compute(5000)
        tree.flush()
        assert damage(tmp_path, [keys_of(5000)[bad]]) == 1
        request = linker_request()
        assert tree.stored_tokens(5000, request=request) == TOKENS
        waits(lambda: tree.linker.prefetches.pages_failed == 1)
        assert tree.stored_tokens(5000, request=request) == bad * PAGE_SIZE
        assert equal(tree.load(5000, request=request), [layer[: bad * PAGE_SIZE] for layer in expected])


def test_a_page_that_is_damaged_after_it_was_brought_is_right_all_the_same(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path, **HOST_CACHE) as tree:
        expected = tree.compute(5000)
        tree.flush()
        request = linker_request()
        tree.stored_tokens(5000, request=request)
        wait_for_prefetch(tree)
        assert damage(tmp_path, keys_of(5000)) == PAGES
        assert equal(tree.load(5000, request=request), expected)


def test_two_requests_of_a_batch_one_warm_and_one_not(core: str, tmp_path: Path) -> None:
    with tree_of(MHA, core, tmp_path, **HOST_CACHE) as tree:
        expected = [tree.compute(5000), tree.compute(9000, 5 * PAGE_SIZE)]
        tree.flush()
        request = linker_request()
        tree.stored_tokens(5000, request=request)
        wait_for_prefetch(tree)
        monkey = tree.linker.prefetches.want
        tree.linker.prefetches.want = lambda *_: None
        cold, cold_rows = tree.queue(9000, 5 * PAGE_SIZE)
        tree.linker.prefetches.want = monkey
        warm, warm_rows = tree.queue(5000, request=request)
        assert tree.run_batch(cold, warm) == []
        assert tree.linker.loads.pages_warm == PAGES
        assert equal(tree.kv(warm_rows), expected[0])
        assert equal(tree.kv(cold_rows), expected[1])


def test_a_look_up_leaves_the_asking_to_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tree_of(MHA, "rust", tmp_path, **HOST_CACHE) as tree:
        tree.compute(5000)
        tree.flush()
        asked: list[str] = []
        monkeypatch.setattr(
            "gdsstore.bound.BoundNamespace.prefetch",
            lambda *_, **__: asked.append(threading.current_thread().name),
        )
        tree.stored_tokens(5000)
        waits(lambda: bool(asked))
        assert asked == ["gdsstore-prefetch"]


def test_without_a_host_cache_nothing_is_prefetched(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        assert tree.linker.prefetches is None


# --- windows and states ---


class PrefetchedSidecars(SidecarRoundTrip):
    linker = LinkerUnderTest(
        "sglang_backend.linker",
        "GdsStoreLinker",
        extra_config=lambda folder: extra_config(folder, **HOST_CACHE),
    )

    def _linked_tree(self, folder: Path) -> tuple[Any, Any, Any]:
        cache, allocator, requests = super()._linked_tree(folder)
        linker = cache.linker.cache_linker
        load, self.stored_by = linker.load, linker

        def late(rid: str, transfers: Any) -> bool:
            waits(lambda: linker.prefetches.requests == 1)
            waits(lambda: linker.prefetches.pages_brought == linker.prefetches.pages_asked)
            return bool(load(rid, transfers))

        linker.load = late
        return cache, allocator, requests

    def test_windows_and_states_come_back_byte_for_byte(self) -> None:
        super().test_windows_and_states_come_back_byte_for_byte()
        asked = self.stored_by.prefetches.pages_asked
        wanted = sum(len(pool.needed_at) > 0 for pool in self.stored_by.pools.values())
        assert self.stored_by.loads.pages_warm == asked > wanted


SMALLEST = {(cfg.has_swa, cfg.has_mamba): cfg for cfg in sorted(CONFIGS, key=lambda cfg: -cfg.page_size)}

for cfg in SMALLEST.values():
    if cfg.has_swa or cfg.has_mamba:
        inherited = {name: None for name in vars(LinkerRoundTrip) if name.startswith("test_")}
        name = f"TestPrefetched_{cfg.label}"
        body = {"cfg": cfg, "core": "rust", **inherited}
        globals()[name] = type(name, (PrefetchedSidecars, CustomTestCase), body)


# --- the parts ---

KEYS = [f"{number:064x}" for number in range(4)]


def bound(handle: Callable[[Any], Prefetch]) -> StoredPool:
    pool: Any = SimpleNamespace(name="kv", source="kv")
    namespace: Any = SimpleNamespace(prefetch=lambda keys, deadline_s: handle(keys))
    return StoredPool(pool, namespace, True)


def a_prefetch(keys: Any) -> Prefetch:
    handle = Prefetch([key.tobytes() for key in keys], len(keys))
    handle.begin(Future())
    return handle


def transfers() -> list[Any]:
    return [SimpleNamespace(name=SimpleNamespace(value="kv"), keys=KEYS)]


def begun(handle: Prefetch) -> Prefetched:
    prefetched = Prefetched([(bound(lambda keys: handle), KEYS)])
    assert prefetched.begin(1.0, lambda *_: None) == 4
    return prefetched


def warm(prefetched: Prefetched) -> list[int]:
    return [int(key[-1]) for key in prefetched.settle()["kv"]]


def test_what_is_warm_is_what_came() -> None:
    handle = a_prefetch(np.zeros((4, 32), np.uint8))
    missed = [PageStatus.LOADED, PageStatus.MISS_ABSENT, PageStatus.LOADED]  # of the first three only
    handle.future.set_result(LoadResult(np.array(missed, np.uint8)))
    assert warm(begun(handle)) == [0, 2]


def test_of_a_prefetch_under_way_the_first_pages_are_warm() -> None:
    handle = a_prefetch(np.zeros((4, 32), np.uint8))
    handle.future.set_running_or_notify_cancel()
    handle.add(2)
    assert warm(begun(handle)) == [0, 1]


def test_a_prefetch_that_was_not_begun_is_cancelled() -> None:
    handle = a_prefetch(np.zeros((4, 32), np.uint8))
    assert warm(begun(handle)) == []
    assert handle.future.cancelled()


def test_a_request_whose_load_has_begun_is_not_prefetched() -> None:
    prefetched = Prefetched([(bound(a_prefetch), KEYS)])
    prefetched.load_begins()
    assert prefetched.begin(1.0, lambda *_: None) == 0
    assert prefetched.settle() == {}


def test_requests_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker_prefetch, "REMEMBERED", 2)
    handles: list[Prefetch] = []

    def prefetch(keys: Any) -> Prefetch:
        handles.append(a_prefetch(keys))
        return handles[-1]

    prefetches = Prefetches([bound(prefetch)], 1.0)
    for rid in "abc":
        prefetches.want(rid, transfers(), 4)
        waits(lambda rid=rid: len(handles) == "abc".index(rid) + 1)  # type: ignore[misc]
    waits(handles[0].future.cancelled)
    assert not handles[1].done
    prefetches.close()
    assert all(handle.future.cancelled() for handle in handles)

"""SGLang's radix tree, Rust and Python, with the linker: what was offloaded comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_fixtures import MHA, MLA, PAGE_SIZE, linker_request

from tests.sglang_linker.tree import PAGES, TOKENS, Tree, equal, tree_of


@pytest.fixture(params=[(kind, core) for kind in (MHA, MLA) for core in ("rust", "python")], ids="-".join)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tree]:
    kind, core = request.param
    with tree_of(kind, core, tmp_path / "store") as tree:
        yield tree


def test_an_insert_is_stored(tree: Tree) -> None:
    tree.compute(5000)
    assert tree.linker.offloads.pages_saved == PAGES
    assert tree.on_device(5000) == TOKENS


def test_evicted_pages_come_back_byte_for_byte(tree: Tree) -> None:
    expected = tree.compute(5000)
    tree.evict()
    assert tree.on_device(5000) == 0
    assert equal(tree.load(5000), expected)


def test_a_flush_keeps_what_is_stored(tree: Tree) -> None:
    expected = tree.compute(5000)
    tree.flush()
    assert tree.stored_tokens(5000) == TOKENS
    assert equal(tree.load(5000), expected)


def test_the_tail_behind_a_device_hit_is_loaded(tree: Tree) -> None:
    expected = tree.compute(5000)
    tree.flush()
    head = 4 * PAGE_SIZE
    rows = tree.allocator.alloc(head)
    tree.insert(5000, rows)
    assert tree.stored_tokens(5000) == TOKENS - head
    assert equal(tree.load(5000), [layer[head:] for layer in expected])


def test_two_requests_of_a_batch_get_each_its_own_pages(tree: Tree) -> None:
    expected = [tree.compute(5000), tree.compute(9000, 5 * PAGE_SIZE)]
    tree.flush()
    first, first_rows = tree.queue(5000)
    second, second_rows = tree.queue(9000, 5 * PAGE_SIZE)
    assert tree.run_batch(first, second) == []
    assert equal(tree.kv(first_rows), expected[0])
    assert equal(tree.kv(second_rows), expected[1])


def test_loaded_pages_are_not_written_again(tree: Tree) -> None:
    tree.compute(5000)
    tree.flush()
    request, rows = tree.queue(5000)
    assert tree.run_batch(request) == []
    tree.insert(5000, rows)
    assert tree.linker.offloads.pages_saved == PAGES
    assert tree.on_device(5000) == TOKENS


def test_the_pages_of_the_last_run_are_found(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        expected = tree.compute(5000)
    with tree_of(MHA, "rust", tmp_path) as tree:
        assert equal(tree.load(5000), expected)


def test_another_kind_of_pool_finds_nothing(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        tree.compute(5000)
    with tree_of(MLA, "rust", tmp_path) as tree:
        assert tree.stored_tokens(5000) == 0


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        tree.compute(5000)
    with tree_of(MHA, "rust", tmp_path, weights="other") as tree:
        assert tree.stored_tokens(5000) == 0


def test_a_waiting_request_does_not_ask_the_store_in_every_pass(tree: Tree) -> None:
    tree.compute(5000)
    tree.flush()
    request = linker_request()
    asked = tree.linker.lookups.asked
    assert [tree.stored_tokens(5000, request=request) for _ in range(20)] == [TOKENS] * 20
    assert tree.linker.lookups.asked == asked + 1


def test_a_request_that_leaves_the_queue_takes_its_load_along(tree: Tree) -> None:
    tree.compute(5000)
    tree.flush()
    request, _ = tree.queue(5000)
    tree.cache.linker.release_request(request.rid)
    assert tree.cache.ready_to_load_host_cache() == -1
    assert tree.linker.loads.pages_loaded == 0


def test_a_flush_while_a_load_runs_leaves_the_linker_usable(tree: Tree) -> None:
    expected = tree.compute(5000)
    tree.flush()
    tree.queue(5000)
    tree.cache.ready_to_load_host_cache()
    tree.flush()
    assert equal(tree.load(5000), expected)


def test_a_flush_lets_what_is_pending_be_stored(tree: Tree) -> None:
    rows = tree.allocator.alloc(TOKENS)
    tree.insert(5000, rows, wait=False)
    tree.flush()
    assert tree.cache.linker.pending_offloads == []
    assert tree.stored_tokens(5000) == TOKENS

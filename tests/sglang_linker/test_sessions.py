"""Pages of a conversation that goes on are not evicted before those of one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_fixtures import MHA, PAGE_SIZE

from gdsstore.catalog.keys import index_keys
from sglang_backend import linker_sessions
from sglang_backend.linker_pools import StoredPool, raw_keys
from sglang_backend.linker_sessions import Sessions
from tests.sglang_linker.tree import Tree, keys_of, tree_of

PAGES = 5  # of a turn; the device has room for 32
TOKENS = PAGES * PAGE_SIZE


@pytest.fixture(autouse=True)
def every_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker_sessions, "WARMED_EVERY_S", 0.0)


def kv(tree: Tree) -> StoredPool:
    (stored,) = tree.linker.stored
    return stored


def stamps(tree: Tree, first: int, tokens: int = TOKENS) -> Any:
    """When the pages of a sequence were last used, in the store's ticks."""
    index, tag = index_keys(raw_keys(keys_of(first, tokens)), kv(tree).bound.digest)
    with tree.linker._store.using() as store:
        where = store.catalog.present(index, tag, prefix=False)
        assert where.found.all()
        return np.array([store.heat._stamps[at] for at in zip(where.segment, where.slot, strict=True)])


def make_cold(tree: Tree, first: int) -> None:
    index, tag = index_keys(raw_keys(keys_of(first, TOKENS)), kv(tree).bound.digest)
    with tree.linker._store.using() as store:
        where = store.catalog.present(index, tag, prefix=False)
        store.heat._stamps[where.segment, where.slot] = 1


def turn(tree: Tree, first: int, tokens: int, session: str | None) -> None:
    """The next turn of a conversation: what it has so far is on the device, and new pages follow."""
    rows = tree.allocator.alloc(tokens)
    tree.insert(first, rows, session=session)


@pytest.mark.parametrize("core", ["rust", "python"])
def test_a_turn_keeps_what_its_session_stored_before_warm(core: str, tmp_path: Path) -> None:
    with tree_of(MHA, core, tmp_path) as tree:
        for first, session in ((5000, "one"), (9000, None)):
            turn(tree, first, TOKENS, session)
            make_cold(tree, first)
            turn(tree, first, TOKENS + 2 * PAGE_SIZE, session)
        assert (stamps(tree, 5000) > 1).all()
        assert (stamps(tree, 9000) == 1).all()


def test_another_sessions_pages_stay_as_they_are(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        turn(tree, 5000, TOKENS, "one")
        make_cold(tree, 5000)
        turn(tree, 9000, TOKENS, "two")
        turn(tree, 9000, TOKENS + PAGE_SIZE, "two")
        assert (stamps(tree, 5000) == 1).all()


def test_a_turn_within_seconds_of_the_last_one_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_sessions, "WARMED_EVERY_S", 3600.0)
    with tree_of(MHA, "rust", tmp_path) as tree:
        turn(tree, 5000, TOKENS, "one")
        make_cold(tree, 5000)
        turn(tree, 5000, TOKENS + PAGE_SIZE, "one")
        assert (stamps(tree, 5000) == 1).all()


def test_keeping_warm_protects_no_segment_from_making_room(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        turn(tree, 5000, TOKENS, "one")
        turn(tree, 5000, TOKENS + PAGE_SIZE, "one")
        with tree.linker._store.using() as store:
            assert not store.heat._lookups.any()


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).integers(0, 256, (PAGES, 32), np.uint8)
    with tree_of(MHA, "rust", tmp_path) as tree:
        sessions = Sessions(tree.linker._store, sessions=3, pages=2 * PAGES)
        for number in range(5):
            sessions.turn(f"s{number}", kv(tree), keys[:2])
        assert (len(sessions), sessions.pages) == (3, 6)
        for number in range(5):
            sessions.turn(f"t{number}", kv(tree), keys)
        assert (len(sessions), sessions.pages) == (2, 2 * PAGES)
        sessions.turn("t4", kv(tree), keys)  # the same pages once more
        assert sessions.pages == 2 * PAGES


def test_of_a_long_session_the_head_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker_sessions, "SESSION_PAGES", 4)
    with tree_of(MHA, "rust", tmp_path) as tree:
        tree.compute(5000, TOKENS)
        make_cold(tree, 5000)
        sessions = Sessions(tree.linker._store)
        stored = raw_keys(keys_of(5000, TOKENS))
        sessions.turn("one", kv(tree), stored)
        sessions.turn("one", kv(tree), stored[:0])
        assert (stamps(tree, 5000) > 1).tolist() == [True] * 4 + [False] * (PAGES - 4)


def test_a_store_that_is_closed_does_no_harm(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        tree.compute(5000, TOKENS)
        sessions, stored = Sessions(tree.linker._store), kv(tree)
    sessions.turn("one", stored, raw_keys(keys_of(5000, TOKENS)))
    assert sessions.pages == PAGES

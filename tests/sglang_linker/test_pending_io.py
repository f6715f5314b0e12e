"""Rows go back to SGLang when nothing touches them any more, whatever went wrong beside them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_fixtures import MHA, device_pool

from gdsstore import LoadResult, PageStatus
from gdsstore.transfer.results import CallResult
from sglang_backend import linker_loads
from tests.sglang_linker.tree import TOKENS, Tree, drafted_tree

SLOW_S = 0.3


class Slow:
    """Calls of the store's that end a while after they were made. What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def call(self, result: CallResult) -> Future[Any]:
        future: Future[Any] = Future()

        def end() -> None:
            self.events.append("ended")
            future.set_result(result)

        self.events.append("begun")
        threading.Timer(SLOW_S, end).start()
        return future


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    """The target's pool, and a draft model's: two calls for each load and save."""
    with drafted_tree(tmp_path, sidecar=[device_pool(MHA)]) as tree:
        yield tree


def statuses(keys: Any, status: PageStatus) -> Any:
    return np.full(len(keys), status, np.uint8)


def test_a_load_that_cannot_begin_waits_for_those_that_have(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.compute(5000)
    tree.flush()
    slow = Slow()

    def load_layers(bound: Any, keys: Any, *_: Any) -> Future[Any]:
        if slow.events:
            raise MemoryError("no room for another one")
        return slow.call(LoadResult(statuses(keys, PageStatus.LOADED)))

    monkeypatch.setattr(linker_loads, "load_layers", load_layers)
    request, _ = tree.queue(5000)
    assert tree.run_batch(request) == [request]
    assert slow.events == ["begun", "ended"]


def test_a_result_that_cannot_be_judged_does_not_hide_the_other_loads(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.compute(5000)
    tree.flush()
    slow = Slow()

    def load_layers(bound: Any, keys: Any, *_: Any) -> Future[Any]:
        if slow.events:
            return slow.call(LoadResult(statuses(keys, PageStatus.LOADED)))
        slow.events.append("lost")
        lost: Future[Any] = Future()
        lost.set_result(LoadResult(statuses(keys, PageStatus.MISS_IO)))
        return lost

    def damaged(keys: Any) -> Any:
        raise ValueError("the catalog cannot be read")

    monkeypatch.setattr(linker_loads, "load_layers", load_layers)
    with monkeypatch.context() as patch:
        for stored in tree.linker.stored:
            patch.setattr(type(stored.bound), "contains", lambda _, keys: damaged(keys))
        request, _ = tree.queue(5000)
        assert tree.run_batch(request) == [request]
    assert slow.events == ["lost", "begun", "ended"]
    assert tree.stored_tokens(5000) == 0, "the retry would be aborted in turn"


def test_a_save_that_cannot_begin_waits_for_those_that_have(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    bound = type(tree.linker.stored[0].bound)

    def save(_: Any, keys: Any, *__: Any, **___: Any) -> Future[Any]:
        if slow.events:
            raise MemoryError("no room for another one")
        return slow.call(CallResult(statuses(keys, PageStatus.SAVED)))

    monkeypatch.setattr(bound, "save", save)
    tree.insert(5000, tree.allocator.alloc(TOKENS).to(torch.int64))
    assert slow.events == ["begun", "ended"]
    tree.flush()
    assert tree.stored_tokens(5000) == 0


def test_a_look_up_that_fails_in_any_way_finds_nothing(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception would leave the other ranks waiting in their reduction."""
    tree.compute(5000)
    tree.flush()

    def broken(*_: Any) -> Any:
        raise RuntimeError("of a kind that nobody thought of")

    with monkeypatch.context() as patch:
        patch.setattr(tree.linker.lookups, "lengths", broken)
        assert [tree.stored_tokens(5000) for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("a look-up failed") == 1
    assert tree.stored_tokens(5000) == TOKENS

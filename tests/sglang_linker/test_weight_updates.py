"""After an update of the running server's weights the linker finds and stores nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_fixtures import MHA

from tests.sglang_backend.updates import update_weights
from tests.sglang_linker.tree import TOKENS, equal, tree_of


def test_pages_of_the_old_weights_are_not_found_and_those_of_the_new_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        old = tree.compute(5000)
        tree.flush()
        assert tree.stored_tokens(5000) == TOKENS
        with monkeypatch.context() as patch:
            update_weights(patch)
            tree.flush()
            assert tree.stored_tokens(5000) == 0
            tree.compute(5000)
            tree.compute(9000)
            assert tree.linker.num_completed_offloads() == 0
            tree.flush()
            assert "Restart the server" in caplog.text
        assert tree.stored_tokens(9000) == 0
        assert equal(tree.load(5000), old), "the old weights' pages were written over"


def test_a_load_that_was_promised_before_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        tree.compute(5000)
        tree.flush()
        free = tree.allocator.available_size()
        lookup = tree.linker.lookup

        def overtaken(rid: str, transfers: list[object]) -> list[int]:
            lengths = lookup(rid, transfers)
            update_weights(monkeypatch)
            return list(lengths)

        monkeypatch.setattr(tree.linker, "lookup", overtaken)
        with pytest.raises(KeyError):  # no rows of its own: it was not queued
            tree.queue(5000)
        assert tree.allocator.available_size() == free

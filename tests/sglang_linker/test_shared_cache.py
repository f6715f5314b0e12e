"""Beside a node daemon, the linker's loads take the pages that lie in the daemon's memory from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_fixtures import MHA

from tests.sglang_linker.tree import PAGES, equal, tree_of
from tests.store.helpers import U8, WAIT_S
from tests.store.shared_tiers import ForgedTier, Lease, link


class Lender(ForgedTier):
    """Remembers what it was asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys: list[U8] = []

    def lease(self, namespace: bytes, keys: U8, deadline: object) -> Lease | None:
        self.keys.append(keys.copy())
        return super().lease(namespace, keys, deadline)  # type: ignore[arg-type]


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("wrong", [0, 3])
def test_pages_in_the_daemons_memory_are_not_read_from_the_drive(
    core: str, wrong: int, tmp_path: Path
) -> None:
    with tree_of(MHA, core, tmp_path) as tree:
        expected = tree.compute(5000)
        tree.flush()
        (stored,) = tree.linker.stored
        bound, store = stored.bound, tree.linker._store
        record_bytes = bound.identity.layout.record_bytes
        tier = Lender(record_bytes)
        link(store, tier)
        tree.stored_tokens(5000)
        assert equal(tree.load(5000), expected)
        keys = np.concatenate(tier.keys)
        assert len(keys) == PAGES
        memory = np.zeros((PAGES, bound.namespace.layout.page_bytes), np.uint8)
        assert bound.load(keys, memory).result(WAIT_S).all_ok
        memory[:wrong] ^= 1
        tier.put(keys, memory)
        tree.flush()
        before = store.stats()
        tree.stored_tokens(5000)
        assert equal(tree.load(5000), expected)
        stats = store.stats()
        assert stats["drive_bytes_read"] - before["drive_bytes_read"] == wrong * record_bytes
        assert stats["pages_loaded_from_shared"] == PAGES - wrong
        assert stats["shared_pages_refused"] == wrong
        assert tier.leases == 0

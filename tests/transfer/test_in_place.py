"""Which pages the drive reads and writes in the caller's own memory: those of whole blocks, where the setting allows it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from gdsstore import ArgumentError, Pieces
from tests.store.helpers import opaque, small_store

BLOCK = mmap.PAGESIZE


@pytest.mark.parametrize("zero_copy", [True, False])
def test_only_pages_of_whole_blocks_are_moved_in_place(tmp_path: Path, zero_copy: bool) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 8 * BLOCK), np.uint8)
    address = memory.ctypes.data + np.array([[0, BLOCK], [2 * BLOCK, 3 * BLOCK + 8], [4 * BLOCK, 6 * BLOCK]])
    pages = Pieces(address.astype(np.uint64), BLOCK, owner=memory)
    with small_store(tmp_path / "s", zero_copy=zero_copy) as store:
        assert opaque(store, 2 * BLOCK).in_place(pages, 3).tolist() == [zero_copy, False, zero_copy]
        odd = Pieces(address[:, 0].astype(np.uint64), BLOCK - 8, owner=memory)
        assert not opaque(store, BLOCK - 8).in_place(odd, 3).any()
        with pytest.raises(ArgumentError):
            opaque(store, BLOCK).in_place(pages, 3)

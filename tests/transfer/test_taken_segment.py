"""A segment that is taken from a save fails its own pages only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gdsstore.catalog.records import SegmentState
from tests.store.helpers import check, make_keys, opaque, save, small_store, statuses


@pytest.mark.parametrize("durability", ["none", "commit"])
def test_pages_in_other_segments_are_saved(tmp_path: Path, durability: str) -> None:
    with small_store(tmp_path / "s", durability=durability, chunk_bytes="1MiB") as store:
        bound, keys = opaque(store), make_keys(200)
        assert save(bound, keys[:100]).all_ok
        with store.catalog.write() as txn:
            (row,) = store.catalog.segments(txn)
            store.catalog.put_segment(txn, row.with_(state=SegmentState.LOST))
        room = row.slot_count - 100
        result = save(bound, keys[100:])
        assert statuses(result) == ["FAILED_IO"] * room + ["SAVED"] * (100 - room)
        assert check(bound, keys[100:]).ok.tolist() == result.ok.tolist()
        assert save(bound, keys[100:]).all_ok
        assert np.all(check(bound, keys[100:]).ok)

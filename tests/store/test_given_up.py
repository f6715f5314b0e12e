"""A segment that was given up is not written to again, also by the process that was filling it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gdsstore.catalog.records import SegmentState
from gdsstore.damage import drop_lost_segments
from tests.store.helpers import check, make_keys, opaque, save, segments, small_store

PAGE_BYTES = 65536  # 15 pages fill a segment of 1 MiB


@pytest.mark.parametrize("count", [8, 15], ids=["partly", "to the end"])
def test_pages_saved_into_a_segment_that_was_given_up_are_not_reported_as_saved(
    count: int, tmp_path: Path
) -> None:
    keys = make_keys(count)
    with small_store(tmp_path) as store:
        namespace = opaque(store, PAGE_BYTES)
        assert save(namespace, keys[:5], PAGE_BYTES).all_ok
        os.truncate(segments(tmp_path)[0], 500_000)
        drop_lost_segments(store, [0])
        result = save(namespace, keys, PAGE_BYTES)
        assert check(namespace, keys, PAGE_BYTES).ok.tolist() == result.ok.tolist()
        (row,) = [row for row in store._segments() if row.segment_id == 0]
        assert row.state is SegmentState.LOST
        assert save(namespace, keys, PAGE_BYTES).all_ok  # elsewhere
        assert check(namespace, keys, PAGE_BYTES).all_ok

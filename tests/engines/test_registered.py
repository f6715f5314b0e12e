"""Registered buffers: each range finds the buffer that holds it whole, and no other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.engines.base import RangePlan
from gdsstore.engines.device import Registered, aligned
from gdsstore.errors import ArgumentError

TOP = (1 << 64) - 200
buffers = st.lists(st.tuples(st.sampled_from([1, 50, 90, 100, TOP]), st.integers(1, 60)), max_size=5)
ranges = st.lists(
    st.tuples(st.one_of(st.integers(0, 220), st.integers(TOP - 5, TOP + 70)), st.integers(1, 80)), max_size=20
)


@given(buffers, ranges)
def test_a_range_is_in_the_buffer_that_holds_all_of_it(
    buffers: list[tuple[int, int]], ranges: list[tuple[int, int]]
) -> None:
    registered, kept = Registered(), list[tuple[int, int]]()
    for base, size in buffers:
        if any(base < other + more and other < base + size for other, more in kept):
            with pytest.raises(ArgumentError):
                registered.add(base, size)
        else:
            registered.add(base, size)
            kept.append((base, size))
    address = np.array([start for start, _ in ranges], np.uint64)
    length = np.array([size for _, size in ranges], np.int64)
    inside, base_of, size_of = registered.find(address, length)
    for i, (start, n) in enumerate(ranges):
        holders = [(base, size) for base, size in kept if base <= start and start + n <= base + size]
        assert bool(inside[i]) == bool(holders)
        assert (int(base_of[i]), int(size_of[i])) == (holders[0] if holders else (start, n))
    for base, _ in kept:
        assert registered.discard(base)
        assert not registered.discard(base)
    assert not registered.find(address, length)[0].any()


def test_only_whole_blocks_at_block_offsets_and_addresses_are_aligned() -> None:
    def plan(offset: int, address: int, length: int) -> RangePlan:
        return RangePlan(
            np.array([3], np.int32),
            np.array([offset], np.int64),
            np.array([address], np.uint64),
            np.array([length], np.int64),
        )

    assert aligned(plan(4096, (1 << 63) + 8192, 12288)).tolist() == [True]
    for odd in ((4097, 8192, 4096), (4096, 8704, 4096), (4096, 8192, 4000)):
        assert aligned(plan(*odd)).tolist() == [False]

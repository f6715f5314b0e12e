"""Raw sums of memory ranges on the host equal the reference, and bad ranges are refused before memory is read."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.checksum.definition import BLOCK_BYTES, reference_raw
from gdsstore.checksum.host import raw_sums
from gdsstore.errors import ArgumentError

BLOCKS = 40
MEMORY = np.frombuffer(hashlib.shake_128(b"host").digest(BLOCKS * BLOCK_BYTES + 64), np.uint8).copy()
MEMORY = MEMORY[-MEMORY.ctypes.data % 64 :]  # hypothesis picks alignments from here


def sums(offset: npt.ArrayLike, nbytes: npt.ArrayLike, first_block: npt.ArrayLike) -> list[int]:
    address = np.uint64(MEMORY.ctypes.data) + np.asarray(offset, np.uint64)
    out = raw_sums(address, np.asarray(nbytes, np.int64), np.asarray(first_block, np.int64))
    assert out.dtype == np.uint64
    return [int(value) for value in out]


@pytest.mark.parametrize("blocks", range(20))
def test_every_length_equals_the_reference(blocks: int) -> None:
    """Covers the four-at-a-time loop, its rest, and ranges too short for it."""
    expected = reference_raw(MEMORY[: blocks * BLOCK_BYTES].tobytes(), 7)
    assert sums([0], [blocks * BLOCK_BYTES], [7]) == [expected]


@settings(max_examples=100, deadline=None)
@given(
    ranges=st.lists(
        st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, 12), st.integers(0, 1 << 40), st.integers(0, 7)),
        max_size=8,
    )
)
def test_a_batch_of_ranges_equals_the_reference(ranges: list[tuple[int, int, int, int]]) -> None:
    offset = [start * BLOCK_BYTES + 8 * shift for start, _, _, shift in ranges]
    nbytes = [max(min(count, BLOCKS - start - 1), 0) * BLOCK_BYTES for start, count, _, _ in ranges]
    first = [block for _, _, block, _ in ranges]
    expected = [
        reference_raw(MEMORY[at : at + size].tobytes(), block)
        for at, size, block in zip(offset, nbytes, first, strict=True)
    ]
    assert sums(offset, nbytes, first) == expected


@settings(max_examples=60, deadline=None)
@given(blocks=st.integers(1, BLOCKS), cuts=st.lists(st.integers(0, BLOCKS), max_size=6))
def test_any_split_of_a_record_into_ranges_adds_up(blocks: int, cuts: list[int]) -> None:
    edges = np.array(sorted([0, *(min(cut, blocks) for cut in cuts), blocks]))
    parts = sums(edges[:-1] * BLOCK_BYTES, np.diff(edges) * BLOCK_BYTES, edges[:-1])
    assert sum(parts) % 2**64 == reference_raw(MEMORY[: blocks * BLOCK_BYTES].tobytes())


def test_threads_get_the_same_sums() -> None:
    expected = sums([0], [BLOCKS // 2 * BLOCK_BYTES], [0])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: sums([0], [BLOCKS // 2 * BLOCK_BYTES], [0]), range(64)))
    assert found == [expected] * 64


def test_no_ranges_give_no_sums() -> None:
    assert sums([], [], []) == []


@pytest.mark.parametrize(
    ("offset", "nbytes", "first_block"),
    [(0, 4095, 0), (0, 1, 0), (0, -4096, 0), (0, 4096, -1), (4, 4096, 0)],
    ids=["short", "a byte", "negative", "negative block", "unaligned"],
)
def test_a_bad_range_is_refused_and_named(offset: int, nbytes: int, first_block: int) -> None:
    with pytest.raises(ArgumentError, match="range=1"):
        sums([0, offset], [4096, nbytes], [0, first_block])


def test_a_null_address_is_refused() -> None:
    with pytest.raises(ArgumentError, match="non-null"):
        raw_sums(np.zeros(1, np.uint64), np.array([4096]), np.array([0]))


def test_arrays_of_unequal_length_are_refused() -> None:
    with pytest.raises(ArgumentError, match="one shape"):
        raw_sums(np.zeros(2, np.uint64), np.array([0]), np.array([0]))

"""Copying raw ranges: every byte of every range, and no byte beside them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from gdsstore.errors import ArgumentError
from gdsstore.memory.copying import STREAM_FROM_BYTES, copy_ranges, zero_ranges

U8 = npt.NDArray[np.uint8]


def _addresses(array: U8, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return (array.ctypes.data + offsets).astype(np.uint64)


def _random_ranges(
    rng: np.random.Generator, room: int, n: int, longest: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """n ranges that do not overlap at the destination, at any alignment, some of them empty."""
    length = rng.integers(0, longest, n)
    length[rng.random(n) < 0.1] = 0
    gaps = rng.integers(1, 200, n)
    destination = np.cumsum(gaps + np.concatenate([[0], length[:-1]]))
    assert destination[-1] + length[-1] < room
    return rng.integers(0, room - longest, n), destination, length


@pytest.mark.parametrize(
    ("n", "longest"),
    [(300, 300), (60, 9000), (40, 1 << 18)],
    ids=["tiny ranges", "around a streamed range's least", "a batch that is streamed"],
)
def test_copied_ranges_equal_numpy_and_their_surroundings_stay(n: int, longest: int) -> None:
    rng = np.random.default_rng(n)
    room = n * (longest + 200) + longest
    source = rng.integers(0, 256, room, dtype=np.uint8)
    destination = rng.integers(0, 256, room, dtype=np.uint8)
    at, to, length = _random_ranges(rng, room, n, longest)
    assert (int(length.sum()) >= STREAM_FROM_BYTES) == (longest == 1 << 18)
    expected = destination.copy()
    for a, t, size in zip(at, to, length, strict=True):
        expected[t : t + size] = source[a : a + size]
    copy_ranges(_addresses(source, at), _addresses(destination, to), length)
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize("shift", [-5000, -64, -1, 1, 64, 5000])
def test_a_large_range_that_overlaps_itself_is_moved_whole(shift: int) -> None:
    size = STREAM_FROM_BYTES + 12345
    memory = np.random.default_rng(0).integers(0, 256, size + 10000, dtype=np.uint8)
    expected = memory.copy()
    expected[5000 + shift : 5000 + shift + size] = memory[5000 : 5000 + size]
    copy_ranges(
        _addresses(memory, np.array([5000])), _addresses(memory, np.array([5000 + shift])), np.array([size])
    )
    np.testing.assert_array_equal(memory, expected)


def test_zeroed_ranges_are_zero_and_their_surroundings_stay() -> None:
    rng = np.random.default_rng(1)
    memory = rng.integers(1, 256, 100_000, dtype=np.uint8)
    _, at, length = _random_ranges(rng, len(memory), 100, 500)
    expected = memory.copy()
    for a, size in zip(at, length, strict=True):
        expected[a : a + size] = 0
    zero_ranges(_addresses(memory, at), length)
    np.testing.assert_array_equal(memory, expected)


def test_no_ranges_and_empty_ranges_touch_no_memory() -> None:
    none = np.array([], dtype=np.uint64)
    copy_ranges(none, none, np.array([], dtype=np.int64))
    zero_ranges(none, np.array([], dtype=np.int64))
    nowhere = np.array([0, 8], dtype=np.uint64)
    copy_ranges(nowhere, nowhere, np.zeros(2, dtype=np.int64))
    zero_ranges(nowhere, np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize(
    ("source", "destination", "length"),
    [
        (np.zeros(2, np.int64), np.zeros(2, np.uint64), np.zeros(2, np.int64)),
        (np.zeros(2, np.uint64), np.zeros(3, np.uint64), np.zeros(2, np.int64)),
        (np.zeros(2, np.uint64), np.zeros(2, np.uint64), np.zeros(2, np.uint64)),
        (np.zeros((1, 2), np.uint64), np.zeros((1, 2), np.uint64), np.zeros((1, 2), np.int64)),
        (np.zeros(2, np.uint64), np.zeros(2, np.uint64), np.array([0, -1])),
    ],
    ids=["signed addresses", "unequal counts", "unsigned lengths", "two dimensions", "a negative length"],
)
def test_arrays_that_do_not_fit_are_refused(
    source: npt.NDArray[np.uint64], destination: npt.NDArray[np.uint64], length: npt.NDArray[np.int64]
) -> None:
    with pytest.raises(ArgumentError):
        copy_ranges(source, destination, length)

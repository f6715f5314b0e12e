"""crc32_rows gives for every row what zlib.crc32 gives."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pytest

from gdsstore.checksum.crc import crc32_rows
from gdsstore.errors import ArgumentError

RANDOM = np.random.default_rng(5)


def with_zlib(rows: npt.NDArray[np.uint8]) -> list[int]:
    return [zlib.crc32(row.tobytes()) for row in rows]


@pytest.mark.parametrize("width", [0, 1, 2, 7, 8, 9, 15, 16, 17, 124, 4092])
def test_rows_of_every_width_equal_zlib(width: int) -> None:
    rows = RANDOM.integers(0, 256, (50, width), dtype=np.uint8)
    assert crc32_rows(rows).tolist() == with_zlib(rows)


def test_rows_of_one_value_equal_zlib() -> None:
    rows = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 124, axis=1)
    assert crc32_rows(rows).tolist() == with_zlib(rows)


def test_a_slice_of_wider_rows_equals_zlib() -> None:
    wide = RANDOM.integers(0, 256, (100, 128), dtype=np.uint8)
    for rows in (wide[:, :124], wide[:, 3:124], wide[::3, 1:], wide[::-1, :9], wide.T[:, :50], wide[:, ::2]):
        assert crc32_rows(rows).tolist() == with_zlib(rows)


def test_a_read_only_array_and_no_rows_are_fine() -> None:
    assert crc32_rows(np.frombuffer(b"123456789", np.uint8).reshape(1, 9)).tolist() == [0xCBF43926]
    assert crc32_rows(np.empty((0, 124), np.uint8)).tolist() == []


def test_anything_but_rows_of_bytes_is_refused() -> None:
    for rows in (np.zeros(8, np.uint8), np.zeros((2, 8), np.int8), np.zeros((2, 2, 2), np.uint8)):
        with pytest.raises(ArgumentError, match="rows must be"):
            crc32_rows(rows)  # type: ignore[arg-type]

"""CRC-32 of many short rows at once: what zlib.crc32 gives for each, without a Python call a row.

Slicing-by-8 (Kounavis and Berry, 2005): eight bytes a step, through eight tables. Record tables hold millions of entries,
and a rebuild checks each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.np.numpy_support import carray

from gdsstore.errors import ArgumentError
from gdsstore.memory.pointers import as_u8_pointer

U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]

_view: Any = carray  # as kernels call them: their Python signatures differ
_pointer: Any = as_u8_pointer

_POLYNOMIAL = np.uint32(0xEDB88320)  # IEEE 802.3, bits reversed; zlib's
_ONES = np.uint32(0xFFFFFFFF)
_EIGHT = np.uint32(8)
_BYTE = np.uint32(0xFF)


def crc32_rows(rows: U8) -> U32:
    """CRC-32 of each row. `rows`: uint8 of shape (n, m); the result: uint32 of shape (n,).

    Rows may lie apart in memory (a slice of wider rows is not copied). Raises ArgumentError for any other array.
    """
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise ArgumentError(f"rows must be uint8 of shape (n, m), not {rows.dtype} of shape {rows.shape}")
    n, m = rows.shape
    if m > 1 and rows.strides[1] != 1:
        rows = np.ascontiguousarray(rows)
    out = np.empty(n, np.uint32)
    # An address instead of the array, so that one compiled kernel serves every spacing of the rows.
    _crc32_rows(np.uint64(rows.ctypes.data), np.int64(rows.strides[0]), np.int64(m), _TABLES, out)
    return out


def _tables() -> U32:
    """Shape (8, 256): table k gives what a byte does to the CRC when k further bytes follow."""
    tables = np.empty((8, 256), np.uint32)
    value = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        value = (value >> np.uint32(1)) ^ np.where(value & np.uint32(1), _POLYNOMIAL, np.uint32(0))
    tables[0] = value
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> _EIGHT) ^ tables[0][tables[k - 1] & _BYTE]
    tables.setflags(write=False)
    return tables


_TABLES = _tables()


@njit(nogil=True, cache=True)
def _crc32_rows(address: np.uint64, stride: np.int64, m: np.int64, tables: U32, out: U32) -> None:
    for i in range(out.size):
        row = _view(_pointer(address + np.uint64(i * stride)), (m,))
        crc = _ONES
        at = 0
        while at + 8 <= m:
            crc = (
                tables[7, row[at] ^ (crc & _BYTE)]
                ^ tables[6, row[at + 1] ^ ((crc >> _EIGHT) & _BYTE)]
                ^ tables[5, row[at + 2] ^ ((crc >> np.uint32(16)) & _BYTE)]
                ^ tables[4, row[at + 3] ^ (crc >> np.uint32(24))]
                ^ tables[3, row[at + 4]]
                ^ tables[2, row[at + 5]]
                ^ tables[1, row[at + 6]]
                ^ tables[0, row[at + 7]]
            )
            at += 8
        while at < m:
            crc = (crc >> _EIGHT) ^ tables[0, (crc ^ row[at]) & _BYTE]
            at += 1
        out[i] = crc ^ _ONES

"""Copying records that somebody else may be writing, with the checksums of what was copied, in one pass.

Each tile of a record is copied to memory of our own first, and summed and handed on from there: whatever becomes of the source
meanwhile, the sum is that of the bytes that arrived. Reading the source once and writing past the cache, this takes less time
than copying and then checking.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from gdsstore.checksum import host
from gdsstore.checksum.definition import BLOCK_BYTES, BLOCK_WORDS, KEYS
from gdsstore.memory import moves, pointers

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

TILE_BYTES = (
    4 * BLOCK_BYTES
)  # the checksum takes four blocks at a time, and a core's first cache holds so much

# As kernels call them: without the typing context.
_view: Any = carray
_pointer: Any = pointers.as_u64_pointer
_move: Any = moves.move
_stream: Any = moves.stream
_fence: Any = moves.fence
_range_sum: Any = host.range_sum

_LINE = np.uint64(moves.STREAM_BYTES)
_IN_LINE = np.uint64(moves.STREAM_BYTES - 1)
_LINE_SHIFT = moves.STREAM_BYTES.bit_length() - 1


def copy_checked(source: U64, record_bytes: int, address: U64, length: I64, first_block: int = 0) -> U64:
    """Copy n records to the pieces of n pages; the raw checksum sums of what was copied, shape (n,).

    `source`: where records of `record_bytes` bytes, whole blocks, begin, (n,). `address`, `length`: the pieces of each page,
    (n, k), of any alignment, together no longer than a record; what pads a page is summed too. `first_block`: where these are parts
    of records, the block that they begin with. Addresses are trusted. The GIL is not held.
    """
    sums = np.zeros(len(source), np.uint64)
    tile = np.empty(TILE_BYTES // 8, np.uint64)
    _copy_checked(
        np.ascontiguousarray(source),
        record_bytes,
        np.ascontiguousarray(address),
        np.ascontiguousarray(length),
        np.uint64(tile.ctypes.data),
        np.uint64(first_block),
        KEYS,
        sums,
    )
    return sums


@numba.njit()
def _write(to: Any, at: Any, nbytes: Any) -> None:
    """Copy past the cache, but for what does not fill lines of it."""
    head = min(np.int64((_LINE - (to & _IN_LINE)) & _IN_LINE), nbytes)
    _move(to, at, head)
    to, at, left = to + np.uint64(head), at + np.uint64(head), nbytes - head
    lines = left >> _LINE_SHIFT
    for line in range(lines):
        offset = np.uint64(line << _LINE_SHIFT)
        _stream(to + offset, at + offset)
    done = lines << _LINE_SHIFT
    _move(to + np.uint64(done), at + np.uint64(done), left - done)


@numba.njit(nogil=True, cache=True)
def _copy_checked(
    source: U64,
    record_bytes: Any,
    address: U64,
    length: I64,
    tile: Any,
    first_block: Any,
    keys: U64,
    sums: U64,
) -> None:
    pieces = address.shape[1]
    for i in range(source.size):
        piece, within = 0, 0
        for done in range(0, record_bytes, TILE_BYTES):
            nbytes = min(TILE_BYTES, record_bytes - done)
            _move(tile, source[i] + np.uint64(done), nbytes)
            words = _view(_pointer(tile), (nbytes // BLOCK_BYTES, BLOCK_WORDS))
            sums[i] += _range_sum(words, first_block + np.uint64(done // BLOCK_BYTES), keys)
            at = 0
            while at < nbytes and piece < pieces:
                part = min(nbytes - at, length[i, piece] - within)
                _write(address[i, piece] + np.uint64(within), tile + np.uint64(at), part)
                at += part
                within += part
                if within == length[i, piece]:
                    piece += 1
                    within = 0
    _fence()

"""Copying and zeroing many ranges of raw memory in one call that holds no GIL.

One call uses one core: split the arrays to use more.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.memory import moves

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

# A batch that does not fit into a core's own cache is written past it: 1.4 to 1.6 times as fast as libc's memmove, which
# first reads each line it is about to overwrite (and does so up to 3/4 of a shared cache that others use as well). Below,
# memmove is a little faster and leaves the bytes in the cache.
STREAM_FROM_BYTES = 4 << 20
_STREAM_RANGE_BYTES = 4096  # shorter ranges are all edges

_move: Any = moves.move  # as kernels call them: without the typing context
_zero: Any = moves.zero
_stream: Any = moves.stream
_fence: Any = moves.fence

_LINE = np.uint64(moves.STREAM_BYTES)
_IN_LINE = np.uint64(moves.STREAM_BYTES - 1)
_LINE_SHIFT = moves.STREAM_BYTES.bit_length() - 1


def copy_ranges(source: U64, destination: U64, length: I64) -> None:
    """Copy `length[i]` bytes from address `source[i]` to address `destination[i]`, for all n, in order of i.

    Any alignment; the two sides of one range may overlap. Addresses are trusted: the caller keeps the memory mapped.
    After a batch of STREAM_FROM_BYTES or more, what was copied is not in the cache: checksum the source, or before.
    Raises ArgumentError for arrays of other dtypes or shapes than (n,), or negative lengths; nothing is copied then.
    """
    _check(length, source=source, destination=destination)
    if int(length.sum()) < STREAM_FROM_BYTES:
        _copy(source, destination, length)
    else:
        _copy_streaming(source, destination, length)


def zero_ranges(address: U64, length: I64) -> None:
    """Set `length[i]` bytes at `address[i]` to zero, for all n. Trust and errors as in `copy_ranges`."""
    _check(length, address=address)
    _zero_all(address, length)


def _check(length: I64, **addresses: U64) -> None:
    if length.dtype != np.int64 or length.ndim != 1 or (len(length) and length.min() < 0):
        raise ArgumentError("length must be int64[n], none below 0", dtype=length.dtype, shape=length.shape)
    for name, array in addresses.items():
        if array.dtype != np.uint64 or array.shape != length.shape:
            raise ArgumentError(
                f"{name} must be uint64[n], as many as lengths",
                dtype=array.dtype,
                shape=array.shape,
                lengths=len(length),
            )


@numba.njit(nogil=True, cache=True)
def _copy(source: U64, destination: U64, length: I64) -> None:
    for i in range(length.size):
        _move(destination[i], source[i], length[i])


@numba.njit(nogil=True, cache=True)
def _copy_streaming(source: U64, destination: U64, length: I64) -> None:
    for i in range(length.size):
        at, to, left = source[i], destination[i], length[i]
        distance = at - to if at > to else to - at
        if left < _STREAM_RANGE_BYTES or distance < np.uint64(left):
            _move(to, at, left)
            continue
        head = np.int64((_LINE - (to & _IN_LINE)) & _IN_LINE)
        _move(to, at, head)
        at, to, left = at + np.uint64(head), to + np.uint64(head), left - head
        lines = left >> _LINE_SHIFT
        for line in range(lines):
            offset = np.uint64(line << _LINE_SHIFT)
            _stream(to + offset, at + offset)
        done = lines << _LINE_SHIFT
        _move(to + np.uint64(done), at + np.uint64(done), left - done)
    _fence()


@numba.njit(nogil=True, cache=True)
def _zero_all(address: U64, length: I64) -> None:
    for i in range(length.size):
        _zero(address[i], length[i])

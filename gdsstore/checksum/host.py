"""Raw checksum sums of ranges of host memory, compiled by numba at first use and cached on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.np.numpy_support import carray

from gdsstore.checksum.definition import BLOCK_BYTES, BLOCK_WORDS, GOLDEN, I64, KEYS, MIX_A, MIX_B, U64
from gdsstore.errors import ArgumentError
from gdsstore.memory.pointers import as_u64_pointer

_view: Any = carray  # as kernels call them: their Python signatures differ
_pointer: Any = as_u64_pointer

# numba turns int64 op uint64 into float64, so that every constant and every index that meets a word is a uint64.
_GOLDEN, _MIX_A, _MIX_B = np.uint64(GOLDEN), np.uint64(MIX_A), np.uint64(MIX_B)
_ZERO, _ONE, _HALF, _LOW, _S33 = (np.uint64(value) for value in (0, 1, 32, 0xFFFFFFFF, 33))


def raw_sums(address: U64, nbytes: I64, first_block: I64) -> U64:
    """The raw sums of n ranges of mapped memory, shape (n,); those of one record's ranges add up to the record's.

    `address`: multiples of 8. `nbytes`: multiples of 4096; 0 gives 0. `first_block`: index in its record of the block with
    which a range begins. The memory stays mapped during the call; the GIL is not held. Raises ArgumentError, before any
    memory is read, for arrays that do not fit together or ranges that are not whole blocks.
    """
    address = np.ascontiguousarray(address, np.uint64)
    nbytes = np.ascontiguousarray(nbytes, np.int64)
    first_block = np.ascontiguousarray(first_block, np.int64)
    if address.ndim != 1 or not address.shape == nbytes.shape == first_block.shape:
        raise ArgumentError(
            "address, nbytes and first_block must have one shape (n,), "
            f"not {address.shape}, {nbytes.shape}, {first_block.shape}"
        )
    out = np.zeros(len(address), np.uint64)
    bad = int(_raw_sums(address, nbytes, first_block, KEYS, out))
    if bad >= 0:
        raise ArgumentError(
            "a checksum range needs a non-null address that is a multiple of 8, a length that is a multiple of 4096 bytes and "
            "a first block >= 0; copy other memory into an arena slot first",
            range=bad,
            address=hex(int(address[bad])),
            nbytes=int(nbytes[bad]),
            first_block=int(first_block[bad]),
        )
    return out


@njit(inline="always")
def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> _S33)) * _MIX_A
    value = (value ^ (value >> _S33)) * _MIX_B
    return value ^ (value >> _S33)


@njit(inline="always")
def _digest(product: np.uint64, linear: np.uint64, block: np.uint64) -> np.uint64:
    digest: np.uint64 = _mix(_mix(product + (block + _ONE) * _GOLDEN) + linear)
    return digest


@njit(inline="always")
def _product(word: np.uint64, key: np.uint64) -> np.uint64:
    keyed = word ^ key
    return (keyed & _LOW) * (keyed >> _HALF)


@njit()
def _first_bad(address: U64, nbytes: I64, first_block: I64) -> int:
    for i in range(address.size):
        whole = nbytes[i] >= 0 and nbytes[i] % BLOCK_BYTES == 0 and first_block[i] >= 0
        if not whole or (nbytes[i] > 0 and (address[i] == _ZERO or address[i] % np.uint64(8) != _ZERO)):
            return i
    return -1


@njit()
def range_sum(words: npt.NDArray[np.uint64], first: np.uint64, keys: U64) -> np.uint64:
    """For kernels: the raw sum of `words`, shape (blocks, 512), the blocks `first` and on of a record."""
    blocks = words.shape[0]
    quarter = blocks // 4
    raw = _ZERO
    # Four blocks at a time, a quarter of the range apart: one stream alone leaves memory bandwidth unused.
    for b in range(quarter):
        p0 = p1 = p2 = p3 = _ZERO
        s0 = s1 = s2 = s3 = _ZERO
        for j in range(BLOCK_WORDS):
            key = keys[j]
            w0 = words[b, j]
            w1 = words[b + quarter, j]
            w2 = words[b + 2 * quarter, j]
            w3 = words[b + 3 * quarter, j]
            p0 += _product(w0, key)
            p1 += _product(w1, key)
            p2 += _product(w2, key)
            p3 += _product(w3, key)
            s0 += w0
            s1 += w1
            s2 += w2
            s3 += w3
        raw += _digest(p0, s0, first + np.uint64(b))
        raw += _digest(p1, s1, first + np.uint64(b + quarter))
        raw += _digest(p2, s2, first + np.uint64(b + 2 * quarter))
        raw += _digest(p3, s3, first + np.uint64(b + 3 * quarter))
    for b in range(4 * quarter, blocks):
        product = _ZERO
        linear = _ZERO
        for j in range(BLOCK_WORDS):
            product += _product(words[b, j], keys[j])
            linear += words[b, j]
        raw += _digest(product, linear, first + np.uint64(b))
    return raw


# The key table is an argument: as a global it would be frozen into the cached machine code.
@njit(nogil=True, cache=True)
def _raw_sums(address: U64, nbytes: I64, first_block: I64, keys: U64, out: U64) -> int:
    """Fills `out`; or returns the index of the first bad range, without reading any memory."""
    bad: int = _first_bad(address, nbytes, first_block)
    if bad >= 0:
        return bad
    for i in range(address.size):
        if nbytes[i] > 0:
            words = _view(_pointer(address[i]), (nbytes[i] // BLOCK_BYTES, BLOCK_WORDS))
            out[i] = range_sum(words, np.uint64(first_block[i]), keys)
    return -1

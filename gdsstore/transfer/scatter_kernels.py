"""Gather, scatter and verify as Triton code. Needs triton; scatter_triton imports it when it is first used.

Memory comes as addresses (int64), because it belongs to no tensor. Tables are int64, one element a word of 8 bytes. Nothing
is specialised on the values of arguments: the kernels that the warm-up compiled are all that there will ever be.

How a page's pieces lie in its record is told by `ends`: row i at `ends + i * ends_step`, k offsets in bytes at which pieces end;
and, where all pieces of all pages have one length, by `piece_bytes` (else 0). `top`: the largest power of two <= k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gdsstore.checksum import definition
from gdsstore.checksum.triton_kernels import block_digests

BLOCK_BYTES = tl.constexpr(definition.BLOCK_BYTES)
BLOCK_WORDS = tl.constexpr(definition.BLOCK_WORDS)


@triton.jit
def _word(table, index):  # type: ignore[no-untyped-def]
    """One element of a table, or a tensor of them."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + index)


@triton.jit
def _outside(at, i, ends, ends_step, pieces, k, top, piece_bytes, record_bytes):  # type: ignore[no-untyped-def]
    """Where bytes `at` (int32, offsets in record i) lie outside: their addresses, and which of them are no padding."""
    pieces = pieces.to(tl.pointer_type(tl.int64)) + i * k
    if piece_bytes > 0:
        index = at // piece_bytes
        start = index * piece_bytes
    else:
        row = ends.to(tl.pointer_type(tl.int64)) + i * ends_step
        index = at * 0  # how many pieces end at or before each byte: binary search for the last of them
        step = top
        while step > 0:
            probe = index + step
            end = tl.load(row + probe - 1, mask=probe <= k, other=0)
            index = tl.where((probe <= k) & (end <= at), probe, index)
            step = step // 2
        start = tl.load(row + index - 1, mask=index > 0, other=0).to(tl.int32)
    there = (index < k) & (at < record_bytes)
    return tl.load(pieces + index, mask=there, other=0) + (at - start), there


@triton.jit
def _add_digests(words, block, there, keys, sums, i):  # type: ignore[no-untyped-def]
    """Add the digests of those of the blocks that are `there` to sums[i]. `words`: uint64 (blocks, 512)."""
    key = tl.load(keys.to(tl.pointer_type(tl.uint64)) + tl.arange(0, BLOCK_WORDS))
    digests = tl.where(there, block_digests(words, key[None, :], block.to(tl.uint64)), 0)
    # Addition modulo 2^64 has no order, so that atomics give the same result every time.
    total = tl.sum(digests, axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums.to(tl.pointer_type(tl.int64)) + i, total, sem="relaxed")


_SIZES = ["ends_step", "k", "top", "piece_bytes", "record_bytes", "groups"]


@triton.jit(do_not_specialize=["records", "ends", "pieces", "sums", "keys", *_SIZES, "first_block"])
def move_units(
    records: tl.int64,
    ends: tl.int64,
    pieces: tl.int64,
    sums: tl.int64,
    keys: tl.int64,
    ends_step: tl.int32,
    k: tl.int32,
    top: tl.int32,
    piece_bytes: tl.int32,
    record_bytes: tl.int32,
    groups: tl.int32,
    first_block: tl.int32,
    UNIT: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    GATHER: tl.constexpr,  # noqa: N803
) -> None:
    """Program i * groups + g moves blocks [g * BLOCKS, (g + 1) * BLOCKS) of record i, and adds their digests to sums[i], as
    those of blocks from `first_block` on.

    All pieces begin and end in the record at multiples of UNIT bytes, and outside at multiples of 16. What is moved is what
    is summed: the words stay in registers. A gather zeroes what is no piece's.
    """
    program = tl.program_id(0)
    i = (program // groups).to(tl.int64)
    block = (program % groups) * BLOCKS + tl.arange(0, BLOCKS)
    units: tl.constexpr = BLOCK_BYTES // UNIT
    at = (block[:, None] * units + tl.arange(0, units)[None, :]) * UNIT
    address, filled = _outside(at, i, ends, ends_step, pieces, k, top, piece_bytes, record_bytes)
    # A unit is at least 16 bytes, and so are all loads and stores: the hints are how the compiler gets to know.
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), [16, 16])
    column = tl.arange(0, UNIT // 8)
    outside = base[:, :, None] + column[None, None, :]
    record = tl.multiple_of(_word(records, i).to(tl.pointer_type(tl.uint64)), 4096)
    inside = record + ((at // 8)[:, :, None] + column[None, None, :])
    there = block < record_bytes // BLOCK_BYTES
    if GATHER:
        words = tl.load(outside, mask=filled[:, :, None], other=0)
        tl.store(inside, words, mask=there[:, None, None])
    else:
        words = tl.load(inside, mask=there[:, None, None], other=0)
        tl.store(outside, words, mask=filled[:, :, None])
    _add_digests(tl.reshape(words, [BLOCKS, BLOCK_WORDS]), block + first_block, there, keys, sums, i)


@triton.jit(do_not_specialize=["records", "ends", "pieces", *_SIZES])
def move_bytes(
    records: tl.int64,
    ends: tl.int64,
    pieces: tl.int64,
    ends_step: tl.int32,
    k: tl.int32,
    top: tl.int32,
    piece_bytes: tl.int32,
    record_bytes: tl.int32,
    groups: tl.int32,
    GATHER: tl.constexpr,  # noqa: N803
) -> None:
    """`move_units` for pieces of any length at any address, byte by byte and without sums: program i * groups + g moves block g."""
    program = tl.program_id(0)
    i = (program // groups).to(tl.int64)
    at = (program % groups) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    address, filled = _outside(at, i, ends, ends_step, pieces, k, top, piece_bytes, record_bytes)
    outside = address.to(tl.pointer_type(tl.uint8))
    inside = _word(records, i).to(tl.pointer_type(tl.uint8)) + at
    if GATHER:
        tl.store(inside, tl.load(outside, mask=filled, other=0))
    else:
        tl.store(outside, tl.load(inside), mask=filled)


@triton.jit(do_not_specialize=["ranges", "sums", "keys", "k", "groups"])
def add_sums(
    ranges: tl.int64,
    sums: tl.int64,
    keys: tl.int64,
    k: tl.int32,
    groups: tl.int32,
    BLOCKS: tl.constexpr,  # noqa: N803
) -> None:
    """Program i * groups + g adds blocks [g * BLOCKS, (g + 1) * BLOCKS) of range i to sums[i // k].

    `ranges`: three words each, an address that is a multiple of 16, a length in bytes and a first block.
    """
    program = tl.program_id(0)
    i = (program // groups).to(tl.int64)
    blocks = _word(ranges, 3 * i + 1) // BLOCK_BYTES
    start = (program % groups).to(tl.int64) * BLOCKS
    if start < blocks:
        block = start + tl.arange(0, BLOCKS)
        there = block < blocks
        base = tl.multiple_of(_word(ranges, 3 * i).to(tl.pointer_type(tl.uint64)), 16)
        at = block[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
        words = tl.load(base + at, mask=there[:, None], other=0)
        _add_digests(words, _word(ranges, 3 * i + 2) + block, there, keys, sums, i // k)

"""The checksum as Triton code. Needs triton; gdsstore.checksum.gpu imports it when it is first used.

`block_digests` is meant to be called by other kernels too: whatever has a record's words in registers can verify them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gdsstore.checksum import definition

BLOCK_WORDS = tl.constexpr(definition.BLOCK_WORDS)
GOLDEN = tl.constexpr(definition.GOLDEN)
MIX_A = tl.constexpr(definition.MIX_A)
MIX_B = tl.constexpr(definition.MIX_B)


@triton.jit
def mix(value):  # type: ignore[no-untyped-def]
    """`definition.mix` of uint64."""
    value = (value ^ (value >> 33)) * MIX_A
    value = (value ^ (value >> 33)) * MIX_B
    return value ^ (value >> 33)


@triton.jit
def block_digests(words, keys, block):  # type: ignore[no-untyped-def]
    """Digests of whole blocks. `words`, `keys`: uint64 (blocks, 512); `block`: uint64 (blocks,), indices in the record."""
    keyed = words ^ keys
    # Halves as 32-bit values, so that the product is one mul.wide.u32 and not a 64-bit multiplication.
    low = keyed.to(tl.uint32).to(tl.uint64)
    high = (keyed >> 32).to(tl.uint32).to(tl.uint64)
    product = tl.sum(low * high, axis=1)
    linear = tl.sum(words, axis=1)
    return mix(mix(product + (block + 1) * GOLDEN) + linear)


@triton.jit
def raw_sums_kernel(data, ranges, keys, out, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Program (i, g) adds blocks [g * BLOCKS, (g + 1) * BLOCKS) of range i to out[i].

    `data`, `keys`: int64 words, because torch has no arithmetic for uint64. `ranges`: int64 (n, 3), each row an offset in
    bytes, a length in bytes and a first block. `data` and every offset are multiples of 16 bytes. `out` starts as zeros;
    addition modulo 2^64 has no order, so that atomics give the same result every time.
    """
    i = tl.program_id(0).to(tl.int64)
    blocks = tl.load(ranges + 3 * i + 1) // (BLOCK_WORDS * 8)
    start = tl.program_id(1).to(tl.int64) * BLOCKS
    if start < blocks:
        block = start + tl.arange(0, BLOCKS)
        column = tl.arange(0, BLOCK_WORDS)
        there = block < blocks
        origin = tl.multiple_of(tl.load(ranges + 3 * i) // 8, 2)  # 16 bytes: loads of two words
        at = origin + block[:, None] * BLOCK_WORDS + column[None, :]
        words = tl.load(data + at, mask=there[:, None], other=0).to(tl.uint64, bitcast=True)
        key = tl.load(keys + column).to(tl.uint64, bitcast=True)
        position = (tl.load(ranges + 3 * i + 2) + block).to(tl.uint64, bitcast=True)
        digests = tl.where(there, block_digests(words, key[None, :], position), 0)
        total = tl.sum(digests, axis=0).to(tl.int64, bitcast=True)
        tl.atomic_add(out + i, total, sem="relaxed")

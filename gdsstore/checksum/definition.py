"""The checksum of a record, version 1: its constants, and a numpy implementation that every other one must equal.

A record is cut into blocks of 4096 bytes, 512 little-endian words w[0..512) each. All arithmetic is modulo 2^64:

    x[j]     = w[j] ^ KEYS[j]
    product  = sum over j of  low32(x[j]) * high32(x[j])
    linear   = sum over j of  w[j]
    digest   = mix(mix(product + (block + 1) * GOLDEN) + linear)        block: its index in the record
    raw      = sum over the record's blocks of digest
    checksum = mix(raw ^ seed)

`product` is the NH form (UMAC, RFC 4418; the inner loop of XXH3), `mix` the finaliser of MurmurHash3. Raw sums of parts of a
record add up to the raw sum of the record, in any order. docs/decisions/001-checksum.md says why it is this one.

Frozen: records on users' drives carry its results. Another definition is another version and another store format.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

CHECKSUM_VERSION = 1
BLOCK_BYTES = 4096
BLOCK_WORDS = BLOCK_BYTES // 8
KEY_BYTES = 32
DIGEST_BYTES = 16

KEY_SEED = 0x67647373746F7265  # "gdsstore"
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: no two blocks of a record get the same offset
MIX_A = 0xFF51AFD7ED558CCD
MIX_B = 0xC4CEB9FE1A85EC53

_MASK = 0xFFFFFFFFFFFFFFFF


def mix(values: U64) -> U64:
    """The finaliser of MurmurHash3, element by element: a bijection in which every input bit reaches every output bit."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(MIX_A)
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(MIX_B)
    return np.asarray(values ^ (values >> np.uint64(33)), np.uint64)


def _key_table() -> U64:
    """BLOCK_WORDS outputs of SplitMix64 (Steele, Lea and Flood 2014) started at KEY_SEED."""
    state = np.uint64(KEY_SEED) + np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)), np.uint64)


KEYS: U64 = _key_table()
KEYS.setflags(write=False)


def reference_raw(data: bytes, first_block: int = 0) -> int:
    """The raw sum of `data` as blocks `first_block`, `first_block` + 1, ... of a record.

    Raises ArgumentError where `data` is not a multiple of 4096 bytes long: records are padded with zeros up to that.
    """
    if len(data) % BLOCK_BYTES:
        raise ArgumentError(
            "checksums are made of whole blocks of 4096 bytes; pad with zeros", nbytes=len(data)
        )
    words = np.frombuffer(data, "<u8").astype(np.uint64).reshape(-1, BLOCK_WORDS)
    keyed = words ^ KEYS
    product = ((keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))).sum(axis=1, dtype=np.uint64)
    linear = words.sum(axis=1, dtype=np.uint64)
    position = np.arange(first_block + 1, first_block + 1 + len(words), dtype=np.uint64)
    digests = mix(mix(product + position * np.uint64(GOLDEN)) + linear)
    return int(digests.sum(dtype=np.uint64))


def seeds(keys: npt.NDArray[np.uint8], namespace_digest: bytes, generation: U64, payload_bytes: I64) -> U64:
    """What ties a checksum to one page in one place: a uint64 a page, shape (n,).

    `keys`: uint8 of shape (n, 32). `generation`: of the segment, shape (n,) or one value. `payload_bytes`: bytes of the page
    without the record's padding, shape (n,) or one value. All of `namespace_digest`'s 16 bytes count.

    The words are folded in one after the other, each step a bijection of the word and of the state: a change of one word
    always changes the seed. Raises ArgumentError for arrays of another shape.
    """
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise ArgumentError(f"keys must be uint8 of shape (n, 32), not {keys.dtype} of shape {keys.shape}")
    if len(namespace_digest) != DIGEST_BYTES:
        raise ArgumentError("a namespace digest has 16 bytes", nbytes=len(namespace_digest))
    n = len(keys)
    columns: list[U64] = list(np.ascontiguousarray(keys).view("<u8").astype(np.uint64).T)
    columns += [np.full(n, word, np.uint64) for word in np.frombuffer(namespace_digest, "<u8")]
    columns += [_column("generation", generation, n), _column("payload_bytes", payload_bytes, n)]
    state = np.full(n, KEY_SEED ^ CHECKSUM_VERSION, np.uint64)
    for step, column in enumerate(columns, start=1):
        state = mix((state ^ column) + np.uint64(step * GOLDEN & _MASK))
    return state


def _column(name: str, values: npt.ArrayLike, n: int) -> U64:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.shape not in ((), (n,)) or (array.size and array.min() < 0):
        raise ArgumentError(
            f"{name} must be integers >= 0 of shape ({n},), not {array.dtype} of shape {array.shape}"
        )
    return np.broadcast_to(array.astype(np.uint64), (n,))


def finish(raw: U64, seed: U64) -> U64:
    """The checksums of records from their whole raw sums and seeds, all of shape (n,)."""
    return mix(np.asarray(raw, np.uint64) ^ np.asarray(seed, np.uint64))

"""The checksum's definition: it never changes, and it sees what can go wrong with a record."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.checksum.definition import BLOCK_BYTES, BLOCK_WORDS, KEYS, finish, mix, reference_raw, seeds
from gdsstore.errors import ArgumentError

NAMESPACE = bytes(range(16))


def pattern(nbytes: int) -> bytes:
    """Fixed bytes that need no random generator: a SHAKE-128 stream."""
    return hashlib.shake_128(b"gdsstore").digest(nbytes)


def seed_of(
    key: bytes = bytes(32), namespace: bytes = NAMESPACE, generation: int = 1, payload_bytes: int = 4096
) -> int:
    keys = np.frombuffer(key, np.uint8).reshape(1, 32)
    return int(seeds(keys, namespace, np.array([generation], np.uint64), np.array([payload_bytes]))[0])


# Records on users' drives carry these. A change here loses every store that exists.
GOLDEN_RAW = {
    "no block": (b"", 0, 0x0),
    "zeros": (bytes(BLOCK_BYTES), 0, 0xE279AA23DBFD4D11),
    "zeros, two blocks": (bytes(2 * BLOCK_BYTES), 0, 0x0C74A4ABD1005F9B),
    "ones": (b"\xff" * BLOCK_BYTES, 0, 0xF270EB100BA0F50D),
    "counting bytes": (bytes(range(256)) * 16, 0, 0xA7FA41FCA72279BF),
    "five blocks": (pattern(5 * BLOCK_BYTES), 0, 0x3F9944B671BED1C3),
    "from block 1000": (pattern(5 * BLOCK_BYTES), 1000, 0x736FACD309115F34),
}


@pytest.mark.parametrize("name", GOLDEN_RAW)
def test_raw_sums_of_known_bytes_never_change(name: str) -> None:
    data, first_block, raw = GOLDEN_RAW[name]
    assert reference_raw(data, first_block) == raw


def test_seeds_and_checksums_of_known_pages_never_change() -> None:
    keys = np.frombuffer(bytes(32) + bytes(range(32)) + b"\xff" * 32, np.uint8).reshape(3, 32)
    seed = seeds(keys, NAMESPACE, np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 4096, 2**40]))
    raw = np.array([0, 1, reference_raw(pattern(5 * BLOCK_BYTES))], np.uint64)
    assert seed.tolist() == [0x78841B15E9C85953, 0xE3BEBCC64BFE6A15, 0x2B3A1DFC145EEE9C]
    assert finish(raw, seed).tolist() == [0x0BBAB92361BB4AB0, 0x5492128B9E63DCFC, 0x5302932E768E8CBA]


def test_the_key_table_is_the_published_splitmix64_stream() -> None:
    state, expected = 0x67647373746F7265, []
    for _ in range(BLOCK_WORDS):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append(z ^ (z >> 31))
    assert KEYS.tolist() == expected


def test_the_key_table_has_no_equal_halves() -> None:
    """Equal halves would let a swap of bits between two words of a page of one repeated value pass."""
    assert len(np.unique(KEYS.view(np.uint32))) == 2 * BLOCK_WORDS


def test_mix_is_the_murmur3_finaliser() -> None:
    assert int(mix(np.array([1], np.uint64))[0]) == 0xB456BCFC34C2CB2C


@pytest.mark.parametrize("background", ["zeros", "ones", "pattern"])
def test_every_flipped_bit_changes_the_raw_sum(background: str) -> None:
    data = {"zeros": bytes(4096), "ones": b"\xff" * 4096, "pattern": pattern(4096)}[background]
    good, flipped = reference_raw(data), bytearray(data)
    seen = set()
    for bit in range(8 * len(data)):
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(reference_raw(bytes(flipped)))
        flipped[bit // 8] ^= 1 << bit % 8
    assert good not in seen
    assert len(seen) == 8 * len(data)


def test_the_same_bit_flipped_in_two_words_is_seen() -> None:
    """The pairs that leave the linear sum as it was: only the keyed products can see them."""
    for background in (bytes(4096), pattern(4096)):
        words = np.frombuffer(background, np.uint64)
        good = reference_raw(background)
        for bit in range(64):
            changed = words.copy()
            changed[7] ^= np.uint64(1 << bit)
            for other in (8, 15, 71, 263, 511):
                pair = changed.copy()
                pair[other] ^= np.uint64(1 << bit)
                assert reference_raw(pair.tobytes()) != good


def test_a_bit_stuck_in_every_word_is_seen() -> None:
    words = np.frombuffer(pattern(4 * BLOCK_BYTES), np.uint64)
    good = reference_raw(words.tobytes())
    for bit in range(64):
        mask = np.uint64(1 << bit)
        for changed in (words | mask, words & ~mask, words ^ mask):
            assert reference_raw(changed.tobytes()) != good


def test_swapped_words_halves_sectors_and_blocks_are_seen() -> None:
    data = pattern(4 * BLOCK_BYTES)
    good = reference_raw(data)
    for unit in (1, 2, 4, 8, 64, 512, 1024, 2048, 4096, 8192):
        parts = np.frombuffer(data, np.uint8).reshape(-1, unit)
        for first, second in ((0, 1), (0, len(parts) - 1), (len(parts) // 2, len(parts) // 2 - 1)):
            swapped = parts.copy()
            swapped[[first, second]] = swapped[[second, first]]
            assert reference_raw(swapped.tobytes()) != good


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x80, 0xFF])
def test_pages_of_one_byte_value_differ_by_length_and_place(byte: int) -> None:
    sums = {
        reference_raw(bytes([byte]) * (n * BLOCK_BYTES), first) for n in range(1, 9) for first in range(8)
    }
    assert len(sums) == 64


def test_a_block_replaced_by_zeros_or_by_its_neighbour_is_seen() -> None:
    data = pattern(4 * BLOCK_BYTES)
    good = reference_raw(data)
    for block in range(4):
        for stale in (bytes(BLOCK_BYTES), data[(block ^ 1) * BLOCK_BYTES :][:BLOCK_BYTES]):
            torn = data[: block * BLOCK_BYTES] + stale + data[(block + 1) * BLOCK_BYTES :]
            assert reference_raw(torn) != good


@settings(max_examples=60, deadline=None)
@given(data=st.data(), blocks=st.integers(1, 6), first=st.integers(0, 1 << 40))
def test_raw_sums_of_parts_add_up(data: Any, blocks: int, first: int) -> None:
    record = pattern(blocks * BLOCK_BYTES)
    cuts = sorted(data.draw(st.lists(st.integers(0, blocks), max_size=4)))
    total = 0
    for start, stop in zip([0, *cuts], [*cuts, blocks], strict=True):
        total += reference_raw(record[start * BLOCK_BYTES : stop * BLOCK_BYTES], first + start)
    assert total % 2**64 == reference_raw(record, first)


words64 = st.integers(0, 2**64 - 1)
sizes = st.integers(0, 2**63 - 1)


@settings(max_examples=200, deadline=None)
@given(
    key=st.binary(min_size=32, max_size=32),
    namespace=st.binary(min_size=16, max_size=16),
    generation=words64,
    payload_bytes=sizes,
    raw=words64,
    byte=st.integers(0, 47),
    delta=st.integers(1, 255),
    generation_too=words64,
    payload_bytes_too=sizes,
)
def test_another_key_namespace_generation_or_length_is_another_checksum(
    key: bytes,
    namespace: bytes,
    generation: int,
    payload_bytes: int,
    raw: int,
    byte: int,
    delta: int,
    generation_too: int,
    payload_bytes_too: int,
) -> None:
    identity = bytearray(key + namespace)
    identity[byte] ^= delta
    others = [seed_of(bytes(identity[:32]), bytes(identity[32:]), generation, payload_bytes)]
    if generation_too != generation:
        others.append(seed_of(key, namespace, generation_too, payload_bytes))
    if payload_bytes_too != payload_bytes:
        others.append(seed_of(key, namespace, generation, payload_bytes_too))
    raws = np.full(len(others), raw, np.uint64)
    mine = finish(raws[:1], np.array([seed_of(key, namespace, generation, payload_bytes)], np.uint64))[0]
    assert mine not in finish(raws, np.array(others, np.uint64))


def test_words_moved_inside_the_identity_change_the_seed() -> None:
    word = pattern(8)
    moved = {seed_of(bytes(8 * at) + word + bytes(24 - 8 * at), bytes(16), 0, 0) for at in range(4)}
    moved |= {seed_of(bytes(32), bytes(8 * at) + word + bytes(8 - 8 * at), 0, 0) for at in range(2)}
    number = int.from_bytes(word, "little") >> 1
    moved |= {seed_of(bytes(32), bytes(16), number, 0), seed_of(bytes(32), bytes(16), 0, number)}
    assert len(moved) == 8


def test_another_raw_sum_is_another_checksum_under_any_seed() -> None:
    seed = np.array([seed_of()], np.uint64)
    results = {int(finish(np.array([raw], np.uint64), seed)[0]) for raw in range(1000)}
    assert len(results) == 1000


def test_seeds_of_a_batch_are_those_of_its_pages() -> None:
    keys = np.frombuffer(pattern(32 * 9), np.uint8).reshape(9, 32)
    generation, payload = np.arange(9, dtype=np.uint64), np.arange(9) * 1000
    batch = seeds(keys, NAMESPACE, generation, payload)
    alone = [seed_of(keys[i].tobytes(), NAMESPACE, i, 1000 * i) for i in range(9)]
    assert batch.dtype == np.uint64
    assert batch.tolist() == alone


def test_what_is_not_whole_blocks_or_not_a_key_is_refused() -> None:
    with pytest.raises(ArgumentError, match="4096"):
        reference_raw(bytes(4095))
    one, length = np.ones(1, np.uint64), np.array([4096])
    with pytest.raises(ArgumentError, match="keys"):
        seeds(np.zeros((1, 31), np.uint8), NAMESPACE, one, length)
    with pytest.raises(ArgumentError, match="16 bytes"):
        seeds(np.zeros((1, 32), np.uint8), NAMESPACE[:15], one, length)
    with pytest.raises(ArgumentError, match="generation"):
        seeds(np.zeros((1, 32), np.uint8), NAMESPACE, np.ones(2, np.uint64), length)
    with pytest.raises(ArgumentError, match="payload_bytes"):
        seeds(np.zeros((1, 32), np.uint8), NAMESPACE, one, np.array([-1]))

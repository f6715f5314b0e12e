"""The bytes of a segment: what was written is what is read, and what was not written by us is not believed."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError, StoreVersionError, VolumeError
from gdsstore.layout import ALIGNMENT
from gdsstore.volume.format import (
    ENTRY,
    ENTRY_BYTES,
    FLAG_STORED,
    SUPERBLOCK,
    SUPERBLOCK_BYTES,
    TABLE_OFFSET,
    Geometry,
    Superblock,
    entry_salt,
    intact,
    seal_entries,
)

MiB = 1 << 20
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
UUID = st.binary(min_size=16, max_size=16)
geometries = st.builds(
    lambda segment, slot: Geometry.of(segment * MiB, min(slot, segment * MiB // 2 // ALIGNMENT) * ALIGNMENT),
    st.sampled_from([1, 2, 16, 256, 16384]),
    st.integers(1, 4096),
)
superblocks = st.builds(Superblock, UUID, U32, U64, geometries)


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 14))
def test_slots_never_overlap_the_table_or_each_other_or_the_end(
    segment_blocks: int, slot_blocks: int
) -> None:
    segment_bytes, slot_bytes = segment_blocks * ALIGNMENT, slot_blocks * ALIGNMENT
    try:
        geometry = Geometry.of(segment_bytes, slot_bytes)
    except ArgumentError:
        assert SUPERBLOCK_BYTES + ALIGNMENT + slot_bytes > segment_bytes  # not one slot and its table fit
        return
    offsets = geometry.slot_offset(np.arange(geometry.slot_count))
    assert geometry.slot_count >= 1
    assert offsets[0] == geometry.data_offset >= TABLE_OFFSET + geometry.slot_count * ENTRY_BYTES
    assert (offsets % ALIGNMENT == 0).all()
    assert (np.diff(offsets) == slot_bytes).all()
    assert offsets[-1] + slot_bytes <= segment_bytes
    wasted = segment_bytes - (offsets[-1] + slot_bytes)
    assert wasted <= slot_bytes + 2 * ALIGNMENT  # and no further slot would have fitted


@pytest.mark.parametrize(
    ("segment", "slot"), [(MiB, 0), (MiB, -4096), (MiB, 100), (MiB + 1, 4096), (MiB, MiB), (0, 4096)]
)
def test_a_geometry_without_room_for_a_slot_is_refused(segment: int, slot: int) -> None:
    with pytest.raises(ArgumentError):
        Geometry.of(segment, slot)


@given(superblocks)
def test_a_superblock_survives_the_round_trip(superblock: Superblock) -> None:
    raw = superblock.encode()
    assert len(raw) == SUPERBLOCK_BYTES
    assert Superblock.decode(raw + b"what follows", "f.seg") == superblock


@given(superblocks, st.integers(0, SUPERBLOCK_BYTES * 8 - 1))
def test_a_superblock_with_a_flipped_bit_is_refused_and_names_the_file(
    superblock: Superblock, bit: int
) -> None:
    raw = bytearray(superblock.encode())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(VolumeError, match=r"f\.seg"):
        Superblock.decode(bytes(raw), "f.seg")


def test_no_bit_of_a_superblock_can_flip_unseen() -> None:
    raw = bytearray(Superblock(b"u" * 16, 7, 9, Geometry.of(MiB, 8192)).encode())
    for bit in range(0, SUPERBLOCK_BYTES * 8, 7):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(VolumeError):
            Superblock.decode(bytes(raw), "f.seg")
        raw[bit // 8] ^= 1 << bit % 8
    Superblock.decode(bytes(raw), "f.seg")


def test_a_superblock_cut_short_or_empty_is_refused() -> None:
    raw = Superblock(b"u" * 16, 7, 9, Geometry.of(MiB, 8192)).encode()
    for length in (0, 8, 100, SUPERBLOCK_BYTES - 1):
        with pytest.raises(VolumeError, match="not a segment"):
            Superblock.decode(raw[:length], "f.seg")
    with pytest.raises(VolumeError, match="not a segment"):
        Superblock.decode(bytes(SUPERBLOCK_BYTES), "f.seg")


def forged(**changes: Any) -> bytes:
    """A superblock with other contents and a right CRC."""
    block = np.frombuffer(Superblock(b"u" * 16, 7, 9, Geometry.of(MiB, 8192)).encode(), SUPERBLOCK).copy()
    for name, value in changes.items():
        block[name] = value
    raw = block.tobytes()[:-4]
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def test_a_newer_format_is_refused_as_such() -> None:
    with pytest.raises(StoreVersionError, match="newer gdsstore") as caught:
        Superblock.decode(forged(version=2), "f.seg")
    assert caught.value.context["path"] == "f.seg"


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_count": 3},
        {"data_offset": 8192},
        {"slot_bytes": 0},
        {"slot_bytes": 100},
        {"segment_bytes": 0},
        {"entry_bytes": 64},
    ],
    ids=str,
)
def test_a_superblock_that_contradicts_itself_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(VolumeError, match="contradicts"):
        Superblock.decode(forged(**changes), "f.seg")


@st.composite
def entry_tables(draw: st.DrawFn) -> np.ndarray:
    rows = draw(
        st.lists(
            st.tuples(st.binary(min_size=48, max_size=48), U64, U64, U64, U32, st.integers(1, 3), U32, U32),
            max_size=8,
        )
    )
    entries = np.zeros(len(rows), ENTRY)
    for entry, (key, checksum, generation, sequence, nbytes, flags, segment, slot) in zip(
        entries, rows, strict=True
    ):
        entry["key"], entry["namespace"] = (
            np.frombuffer(key[:32], np.uint8),
            np.frombuffer(key[32:], np.uint8),
        )
        entry["checksum"], entry["generation"], entry["sequence"] = checksum, generation, sequence
        entry["payload_bytes"], entry["flags"], entry["segment_id"], entry["slot"] = (
            nbytes,
            flags,
            segment,
            slot,
        )
    return entries


@given(entry_tables(), UUID)
def test_entries_survive_the_round_trip(entries: np.ndarray, uuid: bytes) -> None:
    sealed = seal_entries(entries.copy(), entry_salt(uuid))
    read = np.frombuffer(sealed.tobytes(), ENTRY)
    assert len(sealed.tobytes()) == ENTRY_BYTES * len(entries)
    assert intact(read, entry_salt(uuid)).all()
    for name in set(ENTRY.names or ()) - {"crc"}:
        assert np.array_equal(read[name], entries[name])


@given(entry_tables(), UUID, UUID, st.integers(0, ENTRY_BYTES * 8 - 1))
def test_flipped_and_foreign_entries_are_not_intact(
    entries: np.ndarray, uuid: bytes, other: bytes, bit: int
) -> None:
    sealed = seal_entries(entries.copy(), entry_salt(uuid))
    if entry_salt(uuid) != entry_salt(other):
        assert not intact(sealed, entry_salt(other)).any()
    raw = sealed.view(np.uint8).reshape(-1, ENTRY_BYTES)
    raw[:, bit // 8] ^= 1 << bit % 8
    assert not intact(sealed, entry_salt(uuid)).any()


def test_no_bit_of_an_entry_can_flip_unseen() -> None:
    salt = entry_salt(b"u" * 16)
    entry = np.zeros(1, ENTRY)
    entry["key"], entry["flags"], entry["slot"] = np.arange(32), FLAG_STORED, 3
    table = np.repeat(seal_entries(entry, salt), ENTRY_BYTES * 8)
    raw = table.view(np.uint8).reshape(-1, ENTRY_BYTES)
    bits = np.arange(ENTRY_BYTES * 8)
    raw[bits, bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    assert not intact(table, salt).any()


def test_zeros_are_no_entry_whatever_the_salt() -> None:
    """A slot that was never written must not look like one, even if its CRC happened to fit."""
    zeros = np.zeros(1, ENTRY)
    assert not intact(zeros, entry_salt(b"u" * 16)).any()
    crc_of_zeros = zlib.crc32(bytes(ENTRY_BYTES - 4))
    assert not intact(zeros, crc_of_zeros).any()

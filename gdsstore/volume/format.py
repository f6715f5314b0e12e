"""The bytes of a segment: superblock, record table, slots. docs/format.md describes the same, byte by byte.

All numbers are little-endian. A segment is `segment_bytes` long, whatever its slots:

    0              superblock, 4096 bytes
    4096           record table, 128 bytes a slot
    data_offset    slots, `slot_bytes` each, both multiples of 4096; no header inside a slot
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.crc import crc32_rows
from gdsstore.errors import ArgumentError, StoreVersionError, VolumeError
from gdsstore.layout import ALIGNMENT, align_up

FORMAT_VERSION = 1
MAGIC = b"GDSSEG\r\n"  # \r\n: a transfer that rewrites line ends is seen
SUPERBLOCK_BYTES = 4096
ENTRY_BYTES = 128
TABLE_OFFSET = SUPERBLOCK_BYTES

MAX_SEGMENTS = 1 << 18  # ids of a store; none is used twice

FLAG_STORED = 1
FLAG_DELETED = 2  # a tombstone: the page must not come back in a rebuild

SUPERBLOCK = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("segment_id", "<u4"),
        ("store_uuid", "V16"),
        ("generation", "<u8"),
        ("segment_bytes", "<u8"),
        ("slot_bytes", "<u8"),
        ("slot_count", "<u4"),
        ("entry_bytes", "<u4"),
        ("data_offset", "<u8"),
        ("reserved", "V4020"),
        ("crc", "<u4"),  # CRC-32 of the 4092 bytes before
    ]
)

ENTRY = np.dtype(
    [
        ("key", "u1", 32),
        ("namespace", "u1", 16),
        ("checksum", "<u8"),
        ("generation", "<u8"),
        ("sequence", "<u8"),  # nanoseconds; of two entries for a page the larger is the newer
        ("payload_bytes", "<u4"),
        ("flags", "<u4"),
        ("segment_id", "<u4"),
        ("slot", "<u4"),
        ("reserved", "V36"),
        ("crc", "<u4"),  # CRC-32 of the 124 bytes before, xor the store's salt
    ]
)

assert SUPERBLOCK.itemsize == SUPERBLOCK_BYTES
assert ENTRY.itemsize == ENTRY_BYTES

Entries = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the parts of a segment lie. All in bytes from its start."""

    segment_bytes: int
    slot_bytes: int
    slot_count: int
    data_offset: int

    @classmethod
    def of(cls, segment_bytes: int, slot_bytes: int) -> Geometry:
        """As many slots as fit. Raises ArgumentError if none does."""
        if slot_bytes <= 0 or slot_bytes % ALIGNMENT or segment_bytes % ALIGNMENT:
            raise ArgumentError(f"slots of {slot_bytes} bytes are not a multiple of {ALIGNMENT}")
        count = (segment_bytes - SUPERBLOCK_BYTES) // (slot_bytes + ENTRY_BYTES)
        while count > 0 and _data_offset(count) + count * slot_bytes > segment_bytes:
            count -= 1
        if count <= 0:
            raise ArgumentError(
                f"a record of {slot_bytes} bytes does not fit into a segment of {segment_bytes} bytes; "
                "make the store with a larger segment_bytes"
            )
        return cls(segment_bytes, slot_bytes, count, _data_offset(count))

    def slot_offset(self, slot: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self.data_offset + slot * self.slot_bytes


def _data_offset(slot_count: int) -> int:
    return align_up(TABLE_OFFSET + slot_count * ENTRY_BYTES)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a superblock says."""

    store_uuid: bytes
    segment_id: int
    generation: int
    geometry: Geometry

    def encode(self) -> bytes:
        block = np.zeros(1, SUPERBLOCK)
        geometry = self.geometry
        block["magic"], block["version"], block["segment_id"] = MAGIC, FORMAT_VERSION, self.segment_id
        block["store_uuid"] = np.frombuffer(self.store_uuid, "V16")
        block["generation"], block["segment_bytes"] = self.generation, geometry.segment_bytes
        block["slot_bytes"], block["slot_count"] = geometry.slot_bytes, geometry.slot_count
        block["entry_bytes"], block["data_offset"] = ENTRY_BYTES, geometry.data_offset
        raw = block.tobytes()
        return raw[:-4] + zlib.crc32(raw[:-4]).to_bytes(4, "little")

    @classmethod
    def decode(cls, raw: bytes, path: str) -> Superblock:
        """Raises VolumeError where these bytes are not a superblock, StoreVersionError where they are a newer one."""
        if len(raw) < SUPERBLOCK_BYTES or raw[:8] != MAGIC:
            raise VolumeError("not a segment of a gdsstore", path=path)
        if zlib.crc32(raw[:4092]) != int.from_bytes(raw[4092:4096], "little"):
            raise VolumeError("the superblock is damaged", path=path)
        block = np.frombuffer(raw, SUPERBLOCK, 1)[0]
        version = int(block["version"])
        if version > FORMAT_VERSION:
            raise StoreVersionError(
                f"format version {version} is newer than this program's {FORMAT_VERSION}; use a newer gdsstore",
                path=path,
            )
        said = int(block["slot_count"]), int(block["entry_bytes"]), int(block["data_offset"])
        try:
            geometry = Geometry.of(int(block["segment_bytes"]), int(block["slot_bytes"]))
        except ArgumentError as error:
            raise VolumeError(f"the superblock contradicts itself: {error}", path=path) from error
        if said != (geometry.slot_count, ENTRY_BYTES, geometry.data_offset):
            raise VolumeError("the superblock contradicts itself", path=path)
        uuid = block["store_uuid"].tobytes()
        return cls(uuid, int(block["segment_id"]), int(block["generation"]), geometry)


def entry_salt(store_uuid: bytes) -> int:
    """Mixed into every entry's CRC, so that no other store's entry, and no payload, passes for one of this store's."""
    return zlib.crc32(b"gdsstore-entry" + store_uuid)


def seal_entries(entries: Entries, salt: int) -> Entries:
    """Fill in the CRC of every entry, in place. `entries`: ENTRY records of shape (n,)."""
    entries["crc"] = _crcs(entries) ^ np.uint32(salt)
    return entries


def intact(entries: Entries, salt: int) -> npt.NDArray[np.bool_]:
    """Which entries are whole and of this store. Shape (n,)."""
    whole: npt.NDArray[np.bool_] = (entries["crc"] == (_crcs(entries) ^ np.uint32(salt))) & (
        entries["flags"] != 0
    )
    return whole


def _crcs(entries: Entries) -> npt.NDArray[np.uint32]:
    rows = np.ascontiguousarray(entries).view(np.uint8).reshape(len(entries), ENTRY_BYTES)
    return crc32_rows(rows[:, : ENTRY_BYTES - 4])

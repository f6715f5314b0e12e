"""Segment files that someone has tampered with: right ones with changed fields, most of them sealed again with a right CRC."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from gdsstore.volume.format import (
    ENTRY,
    SUPERBLOCK,
    TABLE_OFFSET,
    Entries,
    Geometry,
    Superblock,
    entry_salt,
    seal_entries,
)
from tests.fuzz.inputs import EDGES, NUMBERS, Choices

SUPERBLOCK_FIELDS = tuple(name for name in SUPERBLOCK.names or () if name != "crc")
ENTRY_FIELDS = tuple(name for name in ENTRY.names or () if name != "crc")
SPARSE_BYTES = (0, 1, 4095, 4096, 1 << 20, 1 << 30, 1 << 40, (1 << 43) + 4096)


def entries(choices: Choices, count: int, uuid: bytes, generation: int, segment_id: int) -> Entries:
    """A record table with right entries, of few keys, so that they meet."""
    table = np.zeros(count, ENTRY)
    for slot in range(count):
        table[slot]["key"] = choices.below(6)
        table[slot]["namespace"] = choices.below(2)
        table[slot]["sequence"] = choices.below(200)
        table[slot]["payload_bytes"] = choices.below(4097)
        table[slot]["flags"] = choices.one((1, 1, 3, 2, 0, 1 << 31))
        table[slot]["slot"] = slot
    table["generation"], table["segment_id"] = generation, segment_id
    return seal_entries(table, entry_salt(uuid))


def tamper(choices: Choices, superblock: Superblock, table: Entries) -> bytes:
    """The file from its start to the end of its table, with some fields changed."""
    block = np.frombuffer(superblock.encode(), SUPERBLOCK).copy()
    for _ in range(choices.below(4)):
        set_field(choices, block, 0, choices.one(SUPERBLOCK_FIELDS))
    raw = block.tobytes()
    if choices.below(8):
        raw = raw[:-4] + zlib.crc32(raw[:-4]).to_bytes(4, "little")
    table = table.copy()
    for _ in range(choices.below(6)):
        if len(table):
            set_field(choices, table, choices.below(len(table)), choices.one(ENTRY_FIELDS))
    if choices.below(8):
        seal_entries(table, entry_salt(superblock.store_uuid))
    whole = bytearray(raw.ljust(TABLE_OFFSET, b"\0") + table.tobytes())
    for _ in range(choices.below(4)):
        whole[choices.below(len(whole))] ^= 1 << choices.below(8)
    return bytes(whole)


def set_field(choices: Choices, records: Entries, row: int, name: str) -> None:
    """Another value for one field: a number that counts where the field is one, else any bytes."""
    kind = records.dtype[name]
    if kind.kind == "u" and kind.subdtype is None:
        value = choices.one((choices.one(NUMBERS), choices.one(EDGES), choices.number()))
        records[name][row] = value % (1 << 8 * kind.itemsize)
    else:
        where = records.view(np.uint8).reshape(len(records), -1)
        start = int((records.dtype.fields or {})[name][1])
        fresh = np.frombuffer(choices.raw(16), np.uint8)[: kind.itemsize]
        where[row, start : start + len(fresh)] = fresh


def read_table(raw: bytes, geometry: Geometry) -> Entries:
    """The record table of a segment's file."""
    return np.frombuffer(raw, ENTRY, geometry.slot_count, TABLE_OFFSET)


def write_segment(path: Path, content: bytes, length: int) -> None:
    """A file of `length` bytes, sparse behind its content."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(content[:length])
        file.truncate(length)

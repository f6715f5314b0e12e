"""The segment that pins the format: three pages, the second deleted, as a store writes them when its clock stands still.

`python -m tests.volume.golden_segment` prints the golden file. A change of it is a new format version, with a golden of its own.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.definition import finish, reference_raw, seeds
from gdsstore.layout import PageLayout
from gdsstore.namespace import Namespace
from gdsstore.volume.format import (
    ENTRY,
    ENTRY_BYTES,
    FLAG_DELETED,
    FLAG_STORED,
    SUPERBLOCK,
    SUPERBLOCK_BYTES,
    TABLE_OFFSET,
    Geometry,
    Superblock,
    entry_salt,
    seal_entries,
)

GOLDEN = Path(__file__).parent / "golden" / "segment-v1.json"

SEGMENT_BYTES, PAGE_BYTES, PAGES, DELETED_PAGE = 1 << 20, 5000, 3, 1
STORE_UUID, SEGMENT_ID = bytes(range(16)), 0
CLOCK_NS = 1_700_000_000_123_456_789  # generation, and first sequence
NAMESPACE = Namespace(model="golden", layout=PageLayout.opaque(PAGE_BYTES))


def keys() -> npt.NDArray[np.uint8]:
    """uint8 (3, 32)."""
    return (np.arange(32 * PAGES, dtype=np.uint8) + 32).reshape(PAGES, 32)


def pages() -> npt.NDArray[np.uint8]:
    """uint8 (3, 5000)."""
    return ((7 * np.arange(PAGE_BYTES)[None] + np.arange(PAGES)[:, None]) % 251).astype(np.uint8)


def segment() -> bytes:
    """The whole file, made from the format's definitions and not by a store."""
    slot_bytes = NAMESPACE.layout.record_bytes
    geometry = Geometry.of(SEGMENT_BYTES, slot_bytes)
    records = [page.tobytes().ljust(slot_bytes, b"\0") for page in pages()]
    raw = np.array([reference_raw(record) for record in records], np.uint64)
    generation = np.full(PAGES, CLOCK_NS, np.uint64)
    entries = np.zeros(PAGES, ENTRY)
    entries["key"], entries["namespace"] = keys(), np.frombuffer(NAMESPACE.digest, np.uint8)
    seed = seeds(keys(), NAMESPACE.digest, generation, np.full(PAGES, PAGE_BYTES, np.int64))
    entries["checksum"] = finish(raw, seed)
    entries["generation"], entries["sequence"] = CLOCK_NS, CLOCK_NS + np.arange(PAGES)
    entries["payload_bytes"], entries["flags"] = PAGE_BYTES, FLAG_STORED
    entries["flags"][DELETED_PAGE] |= FLAG_DELETED
    entries["sequence"][DELETED_PAGE] = CLOCK_NS + PAGES  # of the deletion
    entries["segment_id"], entries["slot"] = SEGMENT_ID, np.arange(PAGES)
    whole = bytearray(SEGMENT_BYTES)
    whole[:SUPERBLOCK_BYTES] = Superblock(STORE_UUID, SEGMENT_ID, CLOCK_NS, geometry).encode()
    whole[TABLE_OFFSET : TABLE_OFFSET + PAGES * ENTRY_BYTES] = seal_entries(
        entries, entry_salt(STORE_UUID)
    ).tobytes()
    for slot, record in enumerate(records):
        start = geometry.data_offset + slot * slot_bytes
        whole[start : start + slot_bytes] = record
    return bytes(whole)


def describe(raw: bytes) -> dict[str, Any]:
    """A segment's golden form: its digest, the bytes that carry facts, and these facts decoded."""
    superblock = np.frombuffer(raw, SUPERBLOCK, 1)[0]
    entries = np.frombuffer(raw, ENTRY, PAGES, TABLE_OFFSET)
    return {
        "sha256": hashlib.sha256(raw).hexdigest(),
        "superblock_start": raw[:72].hex(),
        "superblock_crc": raw[SUPERBLOCK_BYTES - 4 : SUPERBLOCK_BYTES].hex(),
        "entries": [entry.tobytes().hex() for entry in entries],
        "superblock_fields": _fields(superblock),
        "entry_fields": [_fields(entry) for entry in entries],
    }


def _fields(record: Any) -> dict[str, Any]:
    plain = {name: record[name] for name in record.dtype.names if name != "reserved"}
    return {
        name: value.tobytes().hex() if value.dtype.kind in "VS" or value.ndim else int(value)
        for name, value in plain.items()
    }


if __name__ == "__main__":
    print(json.dumps(describe(segment()), indent=1))

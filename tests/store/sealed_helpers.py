"""What someone can do who has the drive in hand: read all files, and write records whose checksums are right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdsstore import BoundNamespace, Store
from gdsstore.checksum.definition import finish, reference_raw, seeds
from gdsstore.sealing.cipher import OVERHEAD_BYTES
from gdsstore.volume.format import ENTRY, ENTRY_BYTES, TABLE_OFFSET, entry_salt, seal_entries
from tests.store.helpers import U8, locate, small_store

KEY, OTHER_KEY = "0f" * 32, "f0" * 32


def sealed_store(path: Any, **settings: Any) -> Store:
    return small_store(path, **{"encryption_key": KEY, **settings})


@dataclass(frozen=True)
class OnDrive:
    """Where one page's record lies, and what is needed to forge it."""

    file: Path
    offset: int
    slot: int
    record_bytes: int
    payload_bytes: int
    uuid: bytes

    @classmethod
    def of(cls, namespace: BoundNamespace, keys: U8, which: int, page_bytes: int = 8192) -> OnDrive:
        store, geometry = namespace._store, namespace._drive.geometry
        segment, offset = (int(found[which]) for found in locate(namespace, keys))
        return cls(
            store.volumes[0].segment_path(segment),
            offset,
            (offset - geometry.data_offset) // geometry.slot_bytes,
            geometry.slot_bytes,
            page_bytes + OVERHEAD_BYTES,
            store.uuid,
        )

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.record_bytes)

    def write(self, record: bytes) -> None:
        assert len(record) == self.record_bytes
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            file.write(record)

    def forge(self, record: bytes) -> None:
        """Put a record here, and let the table say that it is the right one. The catalog has to be made anew."""
        self.write(record)
        with self.file.open("r+b") as file:
            file.seek(TABLE_OFFSET + self.slot * ENTRY_BYTES)
            entry = np.frombuffer(file.read(ENTRY_BYTES), ENTRY).copy()
            raw = np.array([reference_raw(record)], np.uint64)
            payload = entry["payload_bytes"].astype(np.int64)
            seed = seeds(entry["key"], entry["namespace"].tobytes(), entry["generation"], payload)
            entry["checksum"] = finish(raw, seed)
            seal_entries(entry, entry_salt(self.uuid))
            file.seek(TABLE_OFFSET + self.slot * ENTRY_BYTES)
            file.write(entry.tobytes())


def flipped(record: bytes, byte: int) -> bytes:
    return record[:byte] + bytes([record[byte] ^ 0x10]) + record[byte + 1 :]


def files_holding(path: Path, pages: U8) -> set[str]:
    """The names of all files below in which a piece of a page stands in the clear."""
    pieces = [page[at : at + 24].tobytes() for page in pages for at in (0, pages.shape[1] // 2)]
    found = set()
    for file in (each for each in path.rglob("*") if each.is_file()):
        content = np.frombuffer(file.read_bytes(), np.uint8)
        blocks = content[: len(content) // 4096 * 4096].reshape(-1, 4096)
        # Without what is empty, which is most of it and slow to search.
        content = blocks[blocks.any(axis=1)].tobytes() + content[blocks.size :].tobytes()
        if any(piece in content for piece in pieces):
            found.add(file.name)
    return found

"""Reading one segment's superblock and record table, and telling what is wrong with them."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.lost import FOR_GOOD
from gdsstore.errors import GdsStoreError, StoreVersionError, VolumeError
from gdsstore.verify.result import Damage, Kind
from gdsstore.volume.format import (
    ENTRY_BYTES,
    FLAG_DELETED,
    FLAG_STORED,
    SUPERBLOCK_BYTES,
    Entries,
    Superblock,
    entry_salt,
    intact,
)
from gdsstore.volume.volume import Volume, read_entries

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Table:
    """A segment whose superblock is right. Arrays have one element a slot."""

    file: str
    superblock: Superblock
    entries: Entries
    valid: Mask  # whole, of this generation, in its own place
    damaged: Mask  # neither valid, nor empty, nor whole and of an earlier generation

    @property
    def live(self) -> Mask:
        """Entries that stand for a page."""
        stored: Mask = self.entries["flags"] & (FLAG_STORED | FLAG_DELETED) == FLAG_STORED
        return self.valid & stored

    def key(self, slot: int) -> str | None:
        """Hex of the key of the page in a slot, where a valid entry tells it."""
        return (
            self.entries["key"][slot].tobytes().hex() if slot < len(self.valid) and self.valid[slot] else None
        )


def read_table(volume: Volume, segment_id: int, store_uuid: bytes, segment_bytes: int) -> Table | Damage:
    """The segment's table; or what is wrong with the segment as a whole. Raises nothing for what a drive can do."""
    file = str(volume.segment_path(segment_id))
    try:
        with volume.table(segment_id) as fd:
            # What counts is on the drive; clean pages in the cache may still hold what it lost.
            os.posix_fadvise(fd, 0, SUPERBLOCK_BYTES, os.POSIX_FADV_DONTNEED)
            size = os.fstat(fd).st_size
            if size < segment_bytes:
                return Damage(
                    file, segment_id, Kind.TRUNCATED, f"{size} bytes long instead of {segment_bytes}"
                )
            superblock = Superblock.decode(os.pread(fd, SUPERBLOCK_BYTES, 0), file)
            wrong = _mismatch(superblock, segment_id, store_uuid, segment_bytes)
            if wrong is not None:
                return Damage(file, segment_id, *wrong)
            os.posix_fadvise(fd, 0, superblock.geometry.data_offset, os.POSIX_FADV_DONTNEED)
            entries = read_entries(fd, superblock.geometry)
    except StoreVersionError as error:
        return Damage(file, segment_id, Kind.FOREIGN, _bare(error))
    except VolumeError as error:
        code = error.context.get("errno")
        kind = Kind.SUPERBLOCK if code is None else Kind.MISSING if code == errno.ENOENT else Kind.UNREADABLE
        return Damage(file, segment_id, kind, _bare(error), unsure=code is not None and code not in FOR_GOOD)
    if len(entries) < superblock.geometry.slot_count:
        return Damage(file, segment_id, Kind.TRUNCATED, "the record table ends early")
    return _table(file, superblock, entries)


def _table(file: str, superblock: Superblock, entries: Entries) -> Table:
    raw = np.ascontiguousarray(entries).view(np.uint64).reshape(len(entries), ENTRY_BYTES // 8)
    empty = ~raw.any(axis=1)
    whole = intact(entries, entry_salt(superblock.store_uuid))
    current = entries["generation"] == superblock.generation
    placed = (entries["segment_id"] == superblock.segment_id) & (entries["slot"] == np.arange(len(entries)))
    fits = entries["payload_bytes"] <= superblock.geometry.slot_bytes
    valid = whole & current & placed & fits
    # Of another generation, but in its own place: left from an earlier use of the segment, maybe with larger slots.
    stale = whole & ~current & placed
    return Table(file, superblock, entries, valid, ~(valid | stale | empty))


def _mismatch(
    superblock: Superblock, segment_id: int, store_uuid: bytes, segment_bytes: int
) -> tuple[Kind, str] | None:
    if superblock.store_uuid != store_uuid:
        return Kind.FOREIGN, "the segment belongs to another store"
    if superblock.segment_id != segment_id:
        return Kind.FOREIGN, f"the file holds segment {superblock.segment_id}"
    if superblock.geometry.segment_bytes != segment_bytes:
        return Kind.SUPERBLOCK, f"the superblock says {superblock.geometry.segment_bytes} bytes a segment"
    return None


def _bare(error: GdsStoreError) -> str:
    """The message without the facts: the file is named beside it."""
    return str(error).partition(" [")[0]

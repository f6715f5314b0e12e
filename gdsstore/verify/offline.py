"""Verification of a store that nobody has open, from its files alone: no LMDB, no lock kept, nothing written.

Without the catalog nothing tells whether a segment's file is missing, and every whole entry is checked, also of pages that the
store does not show any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from gdsstore.directory import StoreDirectory
from gdsstore.errors import StoreBusyError, StoreError, from_os_error
from gdsstore.layout import ALIGNMENT
from gdsstore.transfer.results import PageStatus
from gdsstore.verify.online import Progress
from gdsstore.verify.payloads import Advance, PayloadReader, payload_damage
from gdsstore.verify.result import Damage, Kind, Verification
from gdsstore.verify.table import Table, read_table
from gdsstore.volume.direct import DirectSupport
from gdsstore.volume.volume import Volume

READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class ReadOnlyVolume(Volume):
    """A volume whose files are opened for reading only, also on a filesystem that is mounted so."""

    @property
    def direct(self) -> DirectSupport:
        """Whether its segments can be read with O_DIRECT; tried on one of them, as probing by writing would leave a trace."""
        if self._direct is None:
            self._direct = DirectSupport(0, ALIGNMENT)
            for segment_id in self.segment_ids():
                with contextlib.suppress(OSError):
                    os.close(os.open(self.segment_path(segment_id), READ_ONLY | os.O_DIRECT))
                    self._direct = DirectSupport(os.O_DIRECT, ALIGNMENT)
                    break
        return self._direct

    def open_data(self, segment_id: int) -> int:
        return os.open(self.segment_path(segment_id), READ_ONLY | self.direct.flags)

    def open_table(self, segment_id: int) -> int:
        return os.open(self.segment_path(segment_id), READ_ONLY)


def read_only_volumes(directory: StoreDirectory, paths: Sequence[Path]) -> list[ReadOnlyVolume]:
    """The volumes of the store. Raises StoreError and its kinds where it is none, or one of them is not there."""
    info = directory.read()
    directory.check_volumes(info, paths)
    return [ReadOnlyVolume(number, path) for number, path in enumerate(info.volumes)]


def verify_offline(
    directory: StoreDirectory,
    volumes: Sequence[Volume],
    reader: PayloadReader,
    *,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Check every segment file of a store that no process has open.

    Raises StoreBusyError where one has, or had meanwhile and damage was found; then it may be none.
    """
    info = directory.read()
    refuse_if_used(directory.root)
    mark = _state_mark(directory)
    result = Verification(online=False)
    started = time.monotonic()
    work = sorted((segment_id, volume.index) for volume in volumes for segment_id in volume.segment_ids())
    total = len(work) * info.segment_bytes
    seen: set[int] = set()
    for number, (segment_id, index) in enumerate(work):
        done = number * info.segment_bytes
        progress(done, total)
        volume = volumes[index]
        table = read_table(volume, segment_id, info.uuid, info.segment_bytes)
        result.segments += 1
        if isinstance(table, Damage):
            result.damaged.append(table)
        else:
            _table(table, volume, reader, result, partial(_advance, progress, done, total))
        if segment_id in seen:
            file = str(volume.segment_path(segment_id))
            result.damaged.append(Damage(file, segment_id, Kind.FOREIGN, "the segment exists on two volumes"))
        seen.add(segment_id)
    progress(total, total)
    result.seconds = time.monotonic() - started
    if result.damaged:
        refuse_if_used(directory.root)
        if _state_mark(directory) != mark:
            raise StoreBusyError(
                "the store was used while it was verified; do it again", path=str(directory.root)
            )
    return result


def _advance(progress: Progress, done: int, total: int, offset: int) -> None:
    progress(done + offset, total)


def _table(
    table: Table, volume: Volume, reader: PayloadReader, result: Verification, advance: Advance
) -> None:
    segment_id = table.superblock.segment_id
    for slot in np.flatnonzero(table.damaged).tolist():
        result.damaged.append(
            Damage(table.file, segment_id, Kind.ENTRY, "the table entry is damaged", slot, pages=1)
        )
    slots = np.flatnonzero(table.live)
    result.pages_checked += len(slots)
    result.bytes_checked += len(slots) * table.superblock.geometry.slot_bytes
    status = reader.check(table, volume, slots, advance)
    for at in np.flatnonzero(status != PageStatus.LOADED).tolist():
        result.damaged.append(replace(payload_damage(table, int(slots[at]), PageStatus(status[at])), pages=1))


def refuse_if_used(root: Path) -> None:
    """Raises StoreBusyError where a process has the store open, or is just opening or closing it."""
    # In this order, as the store's own processes do: with open.lock ours, nobody can take our look at users.lock for a user.
    with _locked(root / "open.lock") as opening:
        if not opening:
            raise StoreBusyError(
                "another process is opening or closing this store; do it again", path=str(root)
            )
        with _locked(root / "users.lock") as users:
            if not users:
                raise StoreBusyError("the store is in use; verify it without --offline", path=str(root))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock file for a moment; yields False where another process holds it. One that is not there is nobody's."""
    try:
        fd = os.open(path, READ_ONLY)
    except FileNotFoundError:
        yield True
        return
    except OSError as error:
        raise from_os_error(error, "cannot look at the store's lock file", StoreError) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


def _state_mark(directory: StoreDirectory) -> tuple[int, int] | None:
    """Changes when the store is opened or closed cleanly."""
    try:
        stat = os.lstat(directory.state)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns

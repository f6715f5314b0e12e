"""One directory on one filesystem on one drive, and the segment files in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdsstore.errors import GdsStoreError, VolumeError, from_os_error
from gdsstore.files import make_directory, make_own_directory, read_small, sync_directory
from gdsstore.volume.direct import DirectSupport, probe_direct
from gdsstore.volume.format import (
    ENTRY,
    ENTRY_BYTES,
    MAX_SEGMENTS,
    SUPERBLOCK_BYTES,
    TABLE_OFFSET,
    Entries,
    Geometry,
    Superblock,
)

SUFFIX = ".seg"
NAME = re.compile(r"[0-9]{8}\.seg")
PARTIAL = ".partial"
FILL_BYTES = 4 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Space:
    free_bytes: int
    total_bytes: int


Inode = tuple[int, int]
"""What tells a file from one that was put in its place: device and inode."""


class Volume:
    """The segment files of one volume. Opens no thread, keeps no file open."""

    def __init__(self, index: int, path: Path) -> None:
        self.index = index
        self.path = path
        self.directory = path / "segments"
        self.filling: dict[int, Inode] = {}  # segments that this process fills, or filled, and their files
        self._direct: DirectSupport | None = None

    def prepare(self) -> None:
        """Make the directories, readable by their owner only."""
        try:
            make_directory(self.path)
            make_own_directory(self.directory)
        except OSError as error:
            raise from_os_error(error, "cannot make the volume's directory") from error

    @property
    def direct(self) -> DirectSupport:
        if self._direct is None:
            self._direct = probe_direct(self.directory)
        return self._direct

    def space(self) -> Space:
        try:
            stat = os.statvfs(self.path)
        except OSError as error:
            raise from_os_error(error, "cannot use the volume") from error
        return Space(stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize)

    def segment_path(self, segment_id: int) -> Path:
        return self.directory / f"{segment_id:08d}{SUFFIX}"

    def segment_ids(self) -> dict[int, int]:
        """Segment ids and the bytes that their files take on the drive."""
        found = {}
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        segment_id = int(entry.name[: -len(SUFFIX)])
                        if segment_id < MAX_SEGMENTS:
                            found[segment_id] = entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError as error:
            raise from_os_error(error, "cannot list the volume's segments") from error
        return found

    def remove_partial(self) -> None:
        """Remove what a killed process left while it made a segment."""
        for path in self.directory.glob(f"*{PARTIAL}"):
            with contextlib.suppress(OSError):
                # A pipe of that name would be waited for without O_NONBLOCK.
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its maker is gone
                    path.unlink()
                finally:
                    os.close(fd)

    def create_segment(self, superblock: Superblock, progress: Progress | None = None) -> None:
        """Write a whole segment of zeros and its superblock, then let it appear by rename.

        Fully written, not fallocated alone: unwritten extents are slow or refused on cuFile's P2PDMA path.
        Raises VolumeError (errno ENOSPC on a full drive, EEXIST where there is a file of that name); then nothing is left behind.
        """
        if self.is_of_another(superblock.store_uuid):
            raise VolumeError("the directory holds another store now", path=str(self.path))
        path = self.segment_path(superblock.segment_id)
        partial = left = path.with_suffix(PARTIAL)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | self.direct.flags
        try:
            fd = os.open(partial, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.lexists(path):  # who makes it now would have its `.partial`
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
                _fill(fd, superblock, progress)
                os.fdatasync(fd)
                os.rename(partial, path)
                left = path
                sync_directory(self.directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(left)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            error.filename = error.filename or str(partial)
            raise from_os_error(error, "cannot make a segment") from error
        with self.table(superblock.segment_id) as table:
            # Into the page cache: its first writer checks the superblock while the drive is busy with payloads.
            os.pread(table, SUPERBLOCK_BYTES, 0)

    def is_of_another(self, store_uuid: bytes) -> bool:
        """Whether another store was made in this directory meanwhile, by the marks that stores put there."""
        for name in ("store.json", "volume.json"):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                mark = json.loads(read_small(self.path / name))
                return isinstance(mark, dict) and mark.get("uuid") not in (None, store_uuid.hex())
        return False

    def holds_another(self, segment_id: int, store_uuid: bytes) -> bool:
        """Whether a segment's file is a segment of another store, or another one of this store. Raises nothing."""
        with contextlib.suppress(GdsStoreError), self.table(segment_id) as fd:
            superblock = Superblock.decode(os.pread(fd, SUPERBLOCK_BYTES, 0), "")
            return (superblock.store_uuid, superblock.segment_id) != (store_uuid, segment_id)
        return False

    def inode(self, segment_id: int) -> Inode | None:
        """Of the file that has the segment's name now; None where there is none."""
        try:
            return inode_of(os.lstat(self.segment_path(segment_id)))
        except OSError:
            return None

    def remove_segment(self, segment_id: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.segment_path(segment_id))

    def open_data(self, segment_id: int) -> int:
        """A descriptor for payloads, O_DIRECT where the volume does it."""
        return os.open(
            self.segment_path(segment_id), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | self.direct.flags
        )

    def open_table(self, segment_id: int) -> int:
        """A descriptor for superblock and table, always buffered: entries are 128 bytes and shared between processes."""
        return os.open(self.segment_path(segment_id), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read_superblock(self, segment_id: int) -> Superblock:
        """Raises VolumeError where the segment is missing, foreign, damaged or cut short."""
        path = self.segment_path(segment_id)
        with self.table(segment_id) as fd:
            superblock = Superblock.decode(os.pread(fd, SUPERBLOCK_BYTES, 0), str(path))
            if superblock.segment_id != segment_id:
                raise VolumeError(f"the file holds segment {superblock.segment_id}", path=str(path))
            if os.fstat(fd).st_size < superblock.geometry.segment_bytes:
                raise VolumeError("the segment was cut short", path=str(path))
        return superblock

    @contextlib.contextmanager
    def table(self, segment_id: int) -> Iterator[int]:
        """The buffered descriptor for the length of a `with`; OSErrors come out as VolumeError."""
        try:
            fd = self.open_table(segment_id)
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            if error.filename is None:
                error.filename = str(self.segment_path(segment_id))
            raise from_os_error(error, "cannot use a segment") from error


def inode_of(stat: os.stat_result) -> Inode:
    return stat.st_dev, stat.st_ino


def read_entries(fd: int, geometry: Geometry, first: int = 0, count: int | None = None) -> Entries:
    """Table entries of slots `first` to `first + count`, as ENTRY records; fewer where the file ends early."""
    count = geometry.slot_count - first if count is None else count
    raw = os.pread(fd, count * ENTRY_BYTES, TABLE_OFFSET + first * ENTRY_BYTES)
    whole = len(raw) // ENTRY_BYTES * ENTRY_BYTES
    return np.frombuffer(raw[:whole], ENTRY)


def write_entries(fd: int, first: int, entries: Entries) -> None:
    """Write the entries of consecutive slots with one call. Raises OSError, also where the write came up short."""
    raw = entries.tobytes()
    written = os.pwrite(fd, raw, TABLE_OFFSET + first * ENTRY_BYTES)
    if written != len(raw):
        raise OSError(errno.ENOSPC, "the drive is full: a record table was written in part")


def clear_entries(fd: int, geometry: Geometry, first: int) -> None:
    """Zero the entries of all slots from `first` on, if any is not. Raises OSError."""
    # Up to the first payload: a page written in part would be read first, behind all that the drive has to do.
    start = TABLE_OFFSET + first * ENTRY_BYTES
    size = geometry.data_offset - start
    if os.pread(fd, size, start).strip(b"\0"):
        os.pwrite(fd, bytes(size), start)


def _fill(fd: int, superblock: Superblock, progress: Progress | None) -> None:
    size = superblock.geometry.segment_bytes
    with contextlib.suppress(OSError):  # only to get few, long extents; not every filesystem can
        os.posix_fallocate(fd, 0, size)
    with mmap.mmap(-1, FILL_BYTES) as zeros, memoryview(zeros) as view:
        for offset in range(0, size, FILL_BYTES):
            with view[: min(FILL_BYTES, size - offset)] as block:
                if os.pwrite(fd, block, offset) != len(block):
                    raise OSError(errno.ENOSPC, "the drive is full")
            if progress is not None:
                progress(min(FILL_BYTES, size - offset))
        zeros[:SUPERBLOCK_BYTES] = superblock.encode()
        with view[:SUPERBLOCK_BYTES] as block:
            os.pwrite(fd, block, 0)

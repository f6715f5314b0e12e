"""The file that is read and written: every block of it is on the drive before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np

from gdsstore.errors import StoreError, VolumeError, from_os_error
from gdsstore.memory.arena import Arena
from gdsstore.sizes import MiB, format_size

NAME = "records"
STEP_BYTES = 4 * MiB
SPARE_BYTES = 64 * MiB


class Target:
    """A file of `size_bytes` random bytes in `directory`, written with O_DIRECT: neither sparse nor unwritten extents, which
    cuFile's P2PDMA path refuses or is slow on, and nothing of it in the page cache.

    Raises StoreError where the drive is too full, VolumeError where the file cannot be written with O_DIRECT.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.path = directory / NAME
        self.size_bytes = size_bytes
        room = os.statvfs(directory)
        free = room.f_bavail * room.f_frsize
        if free < size_bytes + SPARE_BYTES:
            raise StoreError(
                f"the bench needs {format_size(size_bytes)} on this drive, and {free >> 20} MiB are free; take another --path",
                path=str(directory),
            )
        try:
            self._write()
        except OSError as error:
            raise from_os_error(
                error, "cannot write with O_DIRECT here; give --path on ext4 or xfs", VolumeError
            ) from error

    def open(self) -> int:
        """A new descriptor, with O_DIRECT, for the caller to close."""
        return os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    def _write(self) -> None:
        rng = np.random.default_rng(1)
        fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            with Arena(STEP_BYTES, pin="off") as block:
                for offset in range(0, self.size_bytes, STEP_BYTES):
                    block.array[:] = rng.integers(0, 256, STEP_BYTES, dtype=np.uint8)
                    if os.pwrite(fd, block.array.data, offset) != STEP_BYTES:
                        raise VolumeError("the drive took only a part of a block", path=str(self.path))
            os.fsync(fd)
        finally:
            os.close(fd)

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)

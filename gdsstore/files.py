"""Small files that are replaced as a whole: written aside, synced, renamed. Never follows a symbolic link."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

MAX_SMALL_BYTES = 1 << 20


def read_small(path: Path) -> bytes:
    """The content of a small regular file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(fd, MAX_SMALL_BYTES)
    finally:
        os.close(fd)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file: afterwards, and after any crash, it holds the old or the new content whole. Raises OSError."""
    aside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            if os.write(fd, content) != len(content):
                raise OSError(errno.ENOSPC, "the drive is full", str(aside))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Make a directory, for its owner only, and its parents, durably. Raises OSError."""
    made = []
    for directory in (path, *path.parents):
        if directory.exists():
            break
        made.append(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in made:
        with contextlib.suppress(
            PermissionError
        ):  # a parent that may be written but not listed cannot be opened
            sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Small files that are replaced as a whole: written aside, synced, renamed. Never follows a symbolic link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from gdsstore.errors import DeadlineError, StoreError
from gdsstore.waiting import Deadline, pause

MAX_SMALL_BYTES = 1 << 20
LOCK_TIMEOUT_S = 60.0


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


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Exclude other threads and processes from a directory's small files, for reading one and writing it anew.

    Raises OSError, and DeadlineError where somebody keeps it for a minute.
    """
    deadline = Deadline(LOCK_TIMEOUT_S)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed:
                    raise DeadlineError("somebody keeps a directory locked", path=str(directory)) from None
                pause(0.005)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where the process was forked meanwhile
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and the parents that lack, all for their owner only, durably. Raises OSError."""
    made = []
    for directory in (path, *path.parents):
        if directory.exists():
            break
        made.append(directory)
    for directory in reversed(made or [path]):  # mkdir's own `parents` would give them a mode by the umask
        directory.mkdir(mode=0o700, exist_ok=True)
    for directory in made:
        with contextlib.suppress(
            PermissionError
        ):  # a parent that may be written but not listed cannot be opened
            sync_directory(directory.parent)


def make_own_directory(path: Path) -> None:
    """Make a directory inside of a store's, which is there.

    Raises OSError, and StoreError where something was put there through which the pages would be in other hands.
    """
    make_directory(path)
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise StoreError("a symbolic link lies in place of a directory of the store; remove it", path=path)
    if found.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
        raise StoreError(
            "a directory of the store belongs to another user; remove it", path=path, owner=found.st_uid
        )


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

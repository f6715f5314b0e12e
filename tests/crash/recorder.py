"""What would be on the drive if the power went now: the content and the names that were synced, and what may have come later.

Patches `os` in a process of its own. Files and directories count as synced when `fdatasync` or `fsync` of them has returned,
with what they held when it was called. The catalog and the heat file are left out: nothing is promised of them.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEFT_OUT = ("catalog", "heat")
OLD_CATALOG_TURN = 6


@dataclass(slots=True)
class SyncedFile:
    content: bytes
    turn: int  # of the sync that it is from: two may overlap


@dataclass(slots=True)
class Directory:
    """Names to inodes: as last synced, then after each change since."""

    listings: list[dict[str, int]] = field(default_factory=list)
    dropped: int = 0  # listings before these

    def add(self, names: dict[str, int]) -> int:
        """Append a listing; its number."""
        self.listings.append(names)
        return self.dropped + len(self.listings) - 1

    def synced(self, number: int) -> None:
        """That listing is on the drive, and nothing older will be seen again."""
        surplus = max(0, number - self.dropped)  # another sync may have been quicker with a newer one
        del self.listings[:surplus]
        self.dropped += surplus


class Recorder:
    """Follows one store directory from now on; all that is there counts as synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, SyncedFile] = {}
        self.directories: dict[Path, Directory] = {}
        self.old_catalog = b""  # from the middle of a life
        self._lock = threading.RLock()
        self._turn = 0
        self._patched: dict[str, Callable[..., Any]] = {}
        for directory in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            if self._followed(directory):
                self.directories[directory] = Directory([listing(directory)])
                for path in directory.iterdir():
                    if path.is_file() and self._followed(path):
                        self.files[path.stat().st_ino] = SyncedFile(path.read_bytes(), 0)

    def install(self) -> None:
        for name, around in (
            ("fdatasync", self._sync),
            ("fsync", self._sync),
            ("rename", self._change),
            ("unlink", self._change),
        ):
            self._patched[name] = getattr(os, name)
            setattr(os, name, lambda *given, name=name, around=around, **named: around(name, *given, **named))

    def _followed(self, path: Path) -> bool:
        if path == self.root:
            return True
        return path.is_relative_to(self.root) and path.relative_to(self.root).parts[0] not in LEFT_OUT

    def _sync(self, name: str, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        status = os.fstat(fd)
        if not self._followed(path):
            self._patched[name](fd)
        elif stat.S_ISDIR(status.st_mode):
            with self._lock:
                directory = self.directories.setdefault(path, Directory())
                number = directory.add(listing(path))
            self._patched[name](fd)
            with self._lock:
                directory.synced(number)
        else:
            with self._lock:
                self._turn += 1
                turn = self._turn
            content = content_of(fd)
            self._patched[name](fd)
            if turn == OLD_CATALOG_TURN:
                self.old_catalog = (self.root / "catalog" / "data.mdb").read_bytes()
            with self._lock:
                before = self.files.get(status.st_ino)
                if before is None or before.turn < turn:
                    self.files[status.st_ino] = SyncedFile(content, turn)

    def _change(self, name: str, *given: Any, **named: Any) -> None:
        parents = {Path(path).parent for path in given}
        with self._lock:
            self._patched[name](*given, **named)
            for parent in parents:
                if self._followed(parent) and parent.is_dir():
                    self.directories.setdefault(parent, Directory([{}])).add(listing(parent))


def listing(directory: Path) -> dict[str, int]:
    with os.scandir(directory) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.is_file(follow_symlinks=False)}


def content_of(fd: int) -> bytes:
    """All of an open file, whether or not it was opened for O_DIRECT."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()

"""System calls that hang on chosen files until they are let go of, as they do on a drive that does not answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LONG_S = 60.0
CALLS = ["pwrite", "fdatasync"]  # of a record table


class LateDrive:
    """`armed`: how many calls of `os.<name>` on files below `path` are to hang from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
        self._call: Callable[..., Any] = getattr(os, name)
        self._path, self._go = path, threading.Event()
        self._lock = threading.Lock()
        self.armed = 0
        self.begun = self.ended = 0  # of those that hang
        monkeypatch.setattr(os, name, self._late)

    def _late(self, fd: int, *rest: Any) -> Any:
        with self._lock:
            late = self.armed > 0 and Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(self._path)
            if late:
                self.armed -= 1
                self.begun += 1
                go = self._go
        if not late:
            return self._call(fd, *rest)
        try:
            assert go.wait(LONG_S)
            return self._call(fd, *rest)
        finally:
            with self._lock:
                self.ended += 1

    def release(self) -> None:
        """Let go of those that hang; none hangs that comes later."""
        with self._lock:
            self.armed = 0
            self._go.set()
            self._go = threading.Event()

    @property
    def waiting(self) -> int:
        with self._lock:
            return self.begun - self.ended


def soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def open_segment_files(path: Path) -> int:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    files = [Path(os.readlink(link)) for link in links if link.is_symlink()]
    return sum(file.suffix == ".seg" and file.is_relative_to(path) for file in files)

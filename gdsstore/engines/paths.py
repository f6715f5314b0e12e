"""How bytes reached the drive, counted."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum

from gdsstore.engines.base import Op


class Path(StrEnum):
    DIRECT = "direct"  # the drive and the GPU, with nothing between
    COMPAT = "compat"  # through host memory, inside cuFile or kvikio
    BOUNCE = "bounce"  # through host memory, by ours
    HOST = "host"  # pages of host memory: there is no device to reach


class PathCounters:
    """Bytes moved so far, by direction, path and file. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[Op, Path, int]] = Counter()
        self._let_go: Counter[tuple[Op, Path]] = Counter()  # of files that were taken out

    def add(self, op: Op, path: Path, nbytes: int, fd: int) -> None:
        if nbytes:
            with self._lock:
                self._bytes[op, path, fd] += nbytes

    def bytes_by(self) -> dict[tuple[Op, Path], int]:
        """A copy, all files together; what never moved is not in it."""
        with self._lock:
            totals = Counter(self._let_go)
            for (op, path, _), nbytes in self._bytes.items():
                totals[op, path] += nbytes
            return dict(totals)

    def take(self, fd: int) -> dict[tuple[Op, Path], int]:
        """What was moved with a file since the last call. Before an fd is closed: another file may get its number."""
        with self._lock:
            mine = {key: nbytes for key, nbytes in self._bytes.items() if key[2] == fd}
            for key in mine:
                del self._bytes[key]
                self._let_go[key[:2]] += mine[key]
            return {(op, path): nbytes for (op, path, _), nbytes in mine.items()}

"""Which way every byte of a store went, and what for: the proof of path."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path


@dataclass(frozen=True, slots=True, order=True)
class PathRow:
    """`nbytes` bytes that `engine` moved between memory and the volume, `direction` "read" or "write"."""

    path: str
    engine: str
    volume: str  # its directory
    direction: str
    nbytes: int


@dataclass(frozen=True, slots=True, order=True)
class IoRow:
    """Bytes, and the requests that moved them. `cls`: what for, the name of a TransferClass in small letters."""

    path: str
    engine: str
    volume: str
    direction: str
    cls: str
    nbytes: int
    operations: int


class PathTotals:
    """Since the store was opened. Thread-safe. Bytes whose end nobody saw (after a deadline) are not in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: dict[tuple[Path, str, int, Op, str], tuple[int, int]] = {}  # bytes, operations

    def add(
        self, path: Path, engine: str, volume: int, op: Op, nbytes: int, *, cls: str, operations: int
    ) -> None:
        if nbytes:
            key = path, engine, volume, op, cls
            with self._lock:
                before = self._moved.get(key, (0, 0))
                self._moved[key] = before[0] + nbytes, before[1] + operations

    def io_rows(self, volumes: list[str]) -> list[IoRow]:
        """Sorted. `volumes`: the directory of each."""
        with self._lock:
            entries = list(self._moved.items())
        return sorted(
            IoRow(path.value, engine, volumes[volume], op.value, cls, *moved)
            for (path, engine, volume, op, cls), moved in entries
        )

    def rows(self, volumes: list[str]) -> list[PathRow]:
        """The same, of all classes together, without the operations."""
        totals: Counter[tuple[str, str, str, str]] = Counter()
        for row in self.io_rows(volumes):
            totals[row.path, row.engine, row.volume, row.direction] += row.nbytes
        return sorted(PathRow(*key, nbytes) for key, nbytes in totals.items())

"""Which way every byte of a store went: the proof of path."""

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


class PathTotals:
    """Bytes since the store was opened. Thread-safe. Bytes whose end nobody saw (after a deadline) are not in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[Path, str, int, Op]] = Counter()

    def add(self, path: Path, engine: str, volume: int, op: Op, nbytes: int) -> None:
        if nbytes:
            with self._lock:
                self._bytes[path, engine, volume, op] += nbytes

    def rows(self, volumes: list[str]) -> list[PathRow]:
        """Sorted. `volumes`: the directory of each."""
        with self._lock:
            entries = list(self._bytes.items())
        return sorted(
            PathRow(path.value, engine, volumes[volume], op.value, nbytes)
            for (path, engine, volume, op), nbytes in entries
        )

"""How bytes reached the drive, counted."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum
from typing import Final, NamedTuple

from gdsstore.engines.base import Op


class Path(StrEnum):
    DIRECT = "direct"  # the drive and the GPU, with nothing between
    COMPAT = "compat"  # through host memory, inside cuFile or kvikio
    BOUNCE = "bounce"  # through host memory, by ours
    HOST = "host"  # pages of host memory: there is no device to reach


class Moved(NamedTuple):
    """Bytes, and the requests that moved them."""

    nbytes: int
    operations: int


NOTHING: Final = Moved(0, 0)


class PathCounters:
    """Bytes moved so far, by direction, path, file and label (see RangePlan). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: dict[tuple[Op, Path, int, str], Moved] = {}
        self._let_go: Counter[tuple[Op, Path]] = Counter()  # bytes of files that were taken out

    def add(self, op: Op, path: Path, nbytes: int, fd: int, *, operations: int = 1, label: str = "") -> None:
        if nbytes:
            with self._lock:
                before = self._moved.get((op, path, fd, label), NOTHING)
                self._moved[op, path, fd, label] = Moved(
                    before.nbytes + nbytes, before.operations + operations
                )

    def bytes_by(self) -> dict[tuple[Op, Path], int]:
        """A copy, all files together; what never moved is not in it."""
        with self._lock:
            totals = Counter(self._let_go)
            for (op, path, *_), moved in self._moved.items():
                totals[op, path] += moved.nbytes
            return dict(totals)

    def take(self, fd: int) -> dict[tuple[Op, Path], int]:
        """The bytes that were moved with a file since the last call. Before an fd is closed: another file may get its number."""
        totals: Counter[tuple[Op, Path]] = Counter()
        for (op, path, _), moved in self.take_labelled(fd).items():
            totals[op, path] += moved.nbytes
        return dict(totals)

    def take_labelled(self, fd: int) -> dict[tuple[Op, Path, str], Moved]:
        """As `take`, by label too."""
        with self._lock:
            mine = {key: moved for key, moved in self._moved.items() if key[2] == fd}
            for key, moved in mine.items():
                del self._moved[key]
                self._let_go[key[:2]] += moved.nbytes
            return {(op, path, label): moved for (op, path, _, label), moved in mine.items()}

"""The files that an engine knows, looked up for a whole plan at once."""

from __future__ import annotations

import threading

import numpy as np

from gdsstore.engines.base import I32, I64
from gdsstore.errors import ArgumentError

UNKNOWN = -1


class FileTable:
    """Sizes of the attached files by descriptor. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Entry fd + 1 holds the size of fd; the first and the last entry stay UNKNOWN for all fds outside the table.
        self._table: I64 = np.full(258, UNKNOWN, np.int64)

    def add(self, fd: int, size: int) -> None:
        """Raises ArgumentError where the fd is attached already, or fd or size make no sense."""
        if fd < 0 or size <= 0:
            raise ArgumentError("only open files with a size can be attached", fd=fd, size=size)
        with self._lock:
            if fd + 2 >= len(self._table):
                larger = np.full(2 * fd + 4, UNKNOWN, np.int64)
                larger[: len(self._table)] = self._table
                self._table = larger
            if self._table[fd + 1] != UNKNOWN:
                raise ArgumentError(
                    "the file is attached already: detach it before its descriptor is closed", fd=fd
                )
            self._table[fd + 1] = size

    def discard(self, fd: int) -> None:
        """Forget a file. Unknown fds are ignored."""
        with self._lock:
            if 0 <= fd < len(self._table) - 2:
                self._table[fd + 1] = UNKNOWN

    def sizes(self, fds: I32) -> I64:
        """Bytes of each file, UNKNOWN where it is not attached. Shape (n,), as `fds`."""
        return self._table.take(fds + 1, mode="clip")

"""Dying at one exact step: before or after a call that changes something on the drive."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gdsstore.catalog.index import Catalog

CALLS = (
    "pwrite",
    "pwritev",
    "rename",
    "unlink",
    "ftruncate",
    "posix_fallocate",
    "fdatasync",
    "fsync",
    "mkdir",
    "write",
)


class Steps:
    """Counts the steps of this process, and kills it at a given one. Installed for good: the process ends with it."""

    def __init__(self, die_at: int, tell: Callable[[str], None]) -> None:
        self._left = die_at
        self._tell = tell
        self._lock = threading.RLock()  # `tell` comes to steps of its own

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._around(name, getattr(os, name)))
        write = Catalog.write

        @contextlib.contextmanager
        def stepped(catalog: Catalog, pages: int = 0) -> Iterator[Any]:
            self.step("before a transaction")
            with write(catalog, pages) as txn:
                yield txn
                self.step("before a commit")
            self.step("after a commit")

        setattr(Catalog, "write", stepped)  # noqa: B010 (mypy knows the type of the name)

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*given: Any, **named: Any) -> Any:
            self.step(f"before {name}")
            result = call(*given, **named)
            self.step(f"after {name}")
            return result

        return stepped

    def step(self, where: str) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._tell(where)
                os.kill(os.getpid(), signal.SIGKILL)

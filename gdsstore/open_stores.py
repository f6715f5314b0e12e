"""The stores that this process has open: each at most once, and none of them survives a fork."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from gdsstore.errors import StoreBusyError

if TYPE_CHECKING:
    from gdsstore.store_core import StoreCore

AFTER_FORK = "open stores behind the fork, or start the process with spawn"

_stores: weakref.WeakSet[StoreCore] = weakref.WeakSet()
_inherited: list[Path] = []  # directories of stores that were open when this process was forked
_lock = threading.Lock()


def claim(store: StoreCore) -> None:
    """LMDB must not be opened twice in a process, so a store cannot be either. Raises StoreBusyError."""
    with _lock:
        for other in _stores:
            if _same(other.directory.root, store.directory.root):
                raise StoreBusyError(
                    "this process has the store open already; share that Store object between threads",
                    path=str(store.directory.root),
                )
        if any(_same(root, store.directory.root) for root in _inherited):
            # The child cannot close its copy either: that waits for ever where the parent was writing.
            message = (
                f"this process was forked while the store was open, and LMDB opens it only once; {AFTER_FORK}"
            )
            raise StoreBusyError(message, path=str(store.directory.root))
        _stores.add(store)


def let_go(store: StoreCore) -> None:
    """The store is closed: it may be opened again."""
    _stores.discard(store)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:  # an open store's directory was removed
        return False


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for store in list(_stores):
        store.after_fork_in_child()
        _inherited.append(store.directory.root)
    _stores.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

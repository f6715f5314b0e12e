"""Stores that are open in this process, by directory: a second backend on the same one shares it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from gdsstore import Config, Store
from gdsstore import open as open_store

log = logging.getLogger("gdsstore.sglang")

_lock = threading.Lock()
_open: dict[tuple[str, ...], _Shared] = {}


class _Shared:
    def __init__(self, store: Store) -> None:
        self.store, self.users = store, 0


def acquire(paths: Sequence[str], config: Config) -> Store:
    """Open the store, or share the one that is open. Raises what `gdsstore.open` raises. Give it back with `release`."""
    key = tuple(os.path.realpath(path) for path in paths)
    with _lock:
        shared = _open.get(key)
        if shared is None:
            shared = _open[key] = _Shared(open_store(list(paths), config=config))
        elif shared.store.config != config:
            log.warning("the store in %s is open already, with other settings; those stay", paths[0])
        shared.users += 1
        return shared.store


def release(store: Store, timeout_s: float) -> None:
    """Close the store if nobody else in this process uses it. `timeout_s`: how long to wait for a drive that does not answer."""
    with _lock:
        for key, shared in _open.items():
            if shared.store is store:
                shared.users -= 1
                if shared.users == 0:
                    del _open[key]
                    store.close(timeout_s)
                return

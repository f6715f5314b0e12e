"""How a store finds the daemon of its node: by a socket in the store directory. Without one, nothing is different."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gdsstore.choices import AutoOff
from gdsstore.errors import GdsStoreError
from gdsstore.observe.activity import Activity
from gdsstore.tiers.remote import NodeTier

log = logging.getLogger("gdsstore.store")

SOCKET_NAME = "node.sock"
LOOK_S = 1.0  # between two looks for a daemon that was not there


def connector(store_uuid: bytes, pin: AutoOff) -> Callable[[Path], NodeTier]:
    """What makes the client of a store's daemon. `pin`: its memory, for CUDA."""

    def connect(directory: Path) -> NodeTier:
        from gdsstore.node.client import NodeClient  # late: who has no daemon needs none of its packages

        return NodeClient(directory, store_uuid=store_uuid, pin=pin.value)

    return connect


class NodeLink:
    """Thread-safe. The client is made once, when the socket is first seen, and goes on by itself when the daemon dies and comes
    back. That is done in a thread: to map and pin the daemon's memory takes a while, and nobody waits for it."""

    def __init__(self, directory: Path, make: Callable[[Path], NodeTier] | None) -> None:
        """`make`: the client for the daemon of a store directory. None: look for no daemon."""
        self._directory, self._make = directory, make
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._tier: NodeTier | None = None
        self._next_look = 0.0
        self._closed = self.seen = False

    @property
    def tier(self) -> NodeTier | None:
        """The daemon's client; None where there is none yet. Never waits."""
        if self._tier is None:
            self.look()
        return self._tier

    def look(self) -> None:
        """Look for a daemon, where none was seen yet, once a second at most."""
        make = self._make
        if make is None or time.monotonic() < self._next_look or not self._lock.acquire(blocking=False):
            return  # or another thread looks
        try:
            if self._closed or self.seen or time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + LOOK_S
            if (self._directory / SOCKET_NAME).exists():
                threading.Thread(
                    target=self._connect, args=(make,), name="gdsstore-node-link", daemon=True
                ).start()
                self.seen, self._next_look = True, math.inf
        except RuntimeError as error:  # the process may have no more threads; the next look tries again
            log.warning("the node daemon is not asked: %s", error)
        finally:
            self._lock.release()

    def report(self, activity: Callable[[], Activity]) -> bool:
        """Tell the daemon what this process did, if there is one. Whether it took that. For no data path: up to 50 ms."""
        tier = self.tier
        if tier is None:
            return False
        with self._telling:  # what was found later is told later
            return tier.report(activity())

    def _connect(self, make: Callable[[Path], NodeTier]) -> None:
        try:
            tier = make(self._directory)
        except (GdsStoreError, ImportError, OSError) as error:
            log.warning("the node daemon's shared host cache is not used: %s", error)
            return
        with self._lock:
            if not self._closed:
                self._tier = tier
                return
        tier.close()

    def close(self) -> None:
        """Let go of the daemon, and look for none any more. Idempotent."""
        with self._lock:
            self._closed = True
            tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()

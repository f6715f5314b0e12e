"""The daemon of a node, as a process with an open store sees it: there or not, and never in the way."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from gdsstore.errors import DeadlineError, GdsStoreError, MissingExtraError
from gdsstore.node import socket_file
from gdsstore.node.errors import DaemonError, ProtocolError
from gdsstore.node.wire import MAX_KEYS
from gdsstore.observe.activity import Activity
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.memory.arena import Mode
    from gdsstore.node.connection import Connection, NodeLookup, NodeProgress
    from gdsstore.node.lease import DaemonLease

log = logging.getLogger("gdsstore.node")

U8 = npt.NDArray[np.uint8]
T = TypeVar("T")
REQUEST_S = 0.05  # what a call costs at most where the daemon hangs
FIRST_CONNECT_S = 0.25  # in the constructor
CONNECT_S = 1.0  # behind the calls
LOOK_S = 1.0  # between two looks whether a daemon is there
MOST_PATIENCE_S = 8.0  # between two tries of one that does not answer
RUN_BYTES = 16
NO_MORE = float("inf")


class NodeClient:
    """A `NodeTier` (gdsstore.tiers.remote). Thread-safe. In a forked child it is dead: no call does anything.

    Where no daemon is, calls return at once with None or False, and at most once a second one of them looks for the socket; a
    thread connects. A call to a daemon that hangs takes at most 50 ms; then it is left alone until it answers, or for a while.
    """

    def __init__(self, directory: Path, *, store_uuid: bytes = b"", pin: Mode = "off") -> None:
        """`directory`: of the store. `store_uuid`: its 16 bytes; b"": whichever store the daemon serves. `pin` "auto": pin the
        daemon's memory for CUDA, where this process uses CUDA already."""
        self.directory, self._uuid, self._pin = directory, store_uuid, pin
        self._pid, self._run = os.getpid(), os.urandom(RUN_BYTES)
        self._reported = False  # to any daemon
        self._guard = threading.Lock()
        self._connection: Connection | None = None
        self._seen: socket_file.Identity | None = None  # the socket file of the last try
        self._connecting = self._closed = False
        self._next_look, self._next_try, self._patience_s = 0.0, 0.0, LOOK_S
        seen = socket_file.identity(directory)
        if seen is not None:
            self._connecting = True
            self._connect(seen, FIRST_CONNECT_S)

    @property
    def connected(self) -> bool:
        return self._connection is not None and os.getpid() == self._pid

    def lease(self, namespace: bytes, keys: U8, deadline: Deadline) -> DaemonLease | None:
        """The records of these keys, uint8 (n, 32), n <= 65536, in the daemon's memory. None: no daemon now, or too late."""
        return self._call(len(keys), deadline, lambda c, d: c.lease(namespace, keys, d))

    def prefetch(self, namespace: bytes, keys: U8, deadline_s: float) -> bool:
        """Ask the daemon to bring pages into its cache within `deadline_s` seconds. Whether it was taken."""
        return self.start_prefetch(namespace, keys, deadline_s) is not None

    def start_prefetch(
        self, namespace: bytes, keys: U8, deadline_s: float, *, priority: int = 0
    ) -> int | None:
        """As `prefetch`, with a number to ask for by; larger priorities (-100 to 100) go first. None: it was not taken."""
        deadline = Deadline(REQUEST_S)
        return self._call(
            len(keys), deadline, lambda c, d: c.prefetch(namespace, keys, float(deadline_s), priority, d)
        )

    def prefetch_progress(self, prefetch: int, deadline: Deadline) -> NodeProgress | None:
        """How far a prefetch of this client is; None: no answer."""
        return self._call(1, deadline, lambda c, d: c.prefetch_progress(prefetch, d))

    def cancel_prefetch(self, prefetch: int, deadline: Deadline) -> NodeProgress | None:
        """Bring no more pages than are under way."""
        return self._call(1, deadline, lambda c, d: c.cancel_prefetch(prefetch, d))

    def lookup(self, namespace: bytes, keys: U8, deadline: Deadline) -> NodeLookup | None:
        """Which pages the daemon's store has, by its catalog. None: no answer."""
        return self._call(len(keys), deadline, lambda c, d: c.lookup(namespace, keys, d))

    def report(self, activity: Activity) -> bool:
        """Tell the daemon what this process did so far with the one store that this client is for. Whether it was taken."""
        return bool(self._call(1, Deadline(REQUEST_S), lambda c, d: self._report(c, activity, d)))

    def _report(self, connection: Connection, activity: Activity, deadline: Deadline) -> bool:
        before = connection.reports_sent
        try:
            return connection.report(self._run, activity, self._reported, deadline)
        finally:  # whatever becomes of it, the daemon may have taken it
            self._reported |= connection.reports_sent != before

    def status(self, deadline: Deadline) -> dict[str, Any]:
        """What /api/status says, over a connection of its own. Raises DaemonError where there is no daemon or it refuses,
        ProtocolError, DeadlineError, MissingExtraError."""
        from gdsstore.node.connection import Connection

        connection = Connection.open(self.directory, self._uuid, deadline, memory=False)
        try:
            return connection.status(deadline)
        finally:
            connection.close()

    def close(self) -> None:
        """Let go of the daemon. Its memory stays mapped until the last lease is closed. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._guard:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- finding and losing it ---

    def _call(
        self, keys: int, deadline: Deadline, ask: Callable[[Connection, Deadline], T | None]
    ) -> T | None:
        if os.getpid() != self._pid or not 0 < keys <= MAX_KEYS:
            return None
        connection = self._connection
        if connection is None:
            self._look()
            return None
        try:
            return ask(connection, Deadline(min(deadline.left_s, REQUEST_S)))
        except (DaemonError, DeadlineError, ProtocolError) as error:
            self._lost(connection, error)
            return None

    def _look(self) -> None:
        """See whether there is a daemon to connect to, now and then. Costs an `lstat` at most, and the start of a thread."""
        now = time.monotonic()
        if now < self._next_look:
            return
        with self._guard:
            if now < self._next_look or self._connecting or self._closed or self._connection is not None:
                return
            self._next_look = now + LOOK_S
            seen = socket_file.identity(self.directory)
            if seen is None or (seen == self._seen and now < self._next_try):
                return
            self._connecting = True
        thread = threading.Thread(
            target=self._connect, args=(seen, CONNECT_S), name="gdsstore-node", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            self._connecting = False

    def _connect(self, seen: socket_file.Identity, seconds: float) -> None:
        connection: Connection | None = None
        try:
            from gdsstore.node.connection import Connection

            connection = Connection.open(self.directory, self._uuid, Deadline(seconds), pin=self._pin)
        except MissingExtraError as error:
            log.warning("there is a node daemon, which is not used: %s", error)
            self._next_look = NO_MORE
        except GdsStoreError as error:
            self._failed(seen, error)
        finally:
            with self._guard:
                self._connecting = False
                if connection is not None and not self._closed:
                    self._connection, self._seen, self._patience_s = connection, seen, LOOK_S
                    log.info("connected to the node daemon of %s", self.directory)
                elif connection is not None:
                    connection.close()

    def _lost(self, connection: Connection, error: GdsStoreError) -> None:
        with self._guard:
            if self._connection is not connection:
                return  # somebody else noticed
            self._connection = None
            self._next_look, self._next_try = time.monotonic() + LOOK_S, 0.0
        connection.close()
        if not self._closed:
            log.warning("going on without the node daemon of %s: %s", self.directory, error)

    def _failed(self, seen: socket_file.Identity, error: GdsStoreError) -> None:
        with self._guard:
            again = seen == self._seen
            self._seen = seen
            self._patience_s = min(2 * self._patience_s, MOST_PATIENCE_S) if again else LOOK_S
            self._next_try = time.monotonic() + self._patience_s
        # A socket that was left by a daemon that died says nothing new each time.
        log.log(logging.DEBUG if again else logging.WARNING, "the node daemon cannot be used: %s", error)

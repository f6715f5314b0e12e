"""Node tiers for tests: one whose memory the test itself writes, and one that is a real process with a real store."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore import Store
from gdsstore.memory.shared import SharedArena, SharedView
from gdsstore.node_link import SOCKET_NAME, NodeLink
from gdsstore.observe.activity import Activity
from gdsstore.tiers.remote import NodeTier
from gdsstore.waiting import Deadline
from tests.store.helpers import WAIT_S, start_python

U8 = npt.NDArray[np.uint8]


def link(store: Store, tier: NodeTier) -> None:
    """Let the store find a daemon."""
    root = store.directory.root
    (root / SOCKET_NAME).touch()
    store.nodes = NodeLink(root, lambda _: tier)
    end = time.monotonic() + WAIT_S
    while store.node is None and time.monotonic() < end:
        time.sleep(0.001)
    assert store.node is tier


class Lease:
    def __init__(
        self, tier: Any, found: npt.NDArray[np.bool_], address: npt.NDArray[np.uint64], number: int = 0
    ) -> None:
        self.found, self.address, self.number = found, address, number
        self.record_bytes = tier.record_bytes
        self._tier, self._closed = tier, False
        tier.leases += 1

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tier.leases -= 1
            self._tier.gave_back(self)


@dataclass
class ForgedTier:
    """Holds whatever the test says it holds, true or not."""

    record_bytes: int
    there: bool = True
    claims: int | None = None  # bytes that lie at each address, it says
    leases: int = 0  # open now
    asked: int = 0
    prefetched: list[tuple[bytes, bytes, float]] = field(default_factory=list)
    records: dict[bytes, int] = field(default_factory=dict)  # by key: its place
    closed: bool = False

    def __post_init__(self) -> None:
        self.arena = SharedArena(400 * self.record_bytes, huge_pages="off", pin="off")
        self.view = SharedView(self.arena.shared.fd, self.arena.size_bytes, pin="off")

    def put(self, keys: U8, pages: U8) -> None:
        """Records, padded with zeros."""
        for key, page in zip(keys, pages, strict=True):
            place = self.records.setdefault(key.tobytes(), len(self.records))
            record = self.arena.array[place * self.record_bytes : (place + 1) * self.record_bytes]
            record[: len(page)], record[len(page) :] = page, 0

    def lease(self, namespace: bytes, keys: U8, deadline: Deadline) -> Lease | None:
        self.asked += len(keys)
        if not self.there:
            return None
        place = np.array([self.records.get(key.tobytes(), -1) for key in keys], np.int64)
        address = np.where(place >= 0, self.view.address + place * self.record_bytes, 0).astype(np.uint64)
        lease = Lease(self, place >= 0, address)
        lease.record_bytes = self.record_bytes if self.claims is None else self.claims
        return lease

    def gave_back(self, lease: Lease) -> None: ...

    def prefetch(self, namespace: bytes, keys: U8, deadline_s: float) -> bool:
        self.prefetched.append((namespace, keys.tobytes(), deadline_s))
        return self.there

    def report(self, activity: Activity) -> bool:
        return self.there

    def close(self) -> None:
        self.closed = True


DAEMON = """
from multiprocessing.connection import Listener
from multiprocessing.reduction import send_handle
store = small_store(sys.argv[1], host_cache="8MiB", share_host_cache=True, daemon="off", capacity=None)
pages = opaque(store)
listener = Listener(sys.argv[2], "AF_UNIX")
print("ready", flush=True)
client = listener.accept()
shared = store.shared_memory()
client.send(shared.size_bytes)
send_handle(client, shared.fd, None)
held = {}
while True:
    try:
        what, *given = client.recv()
    except EOFError:
        break
    if what == "lease":
        number, keys = given
        held[number] = pages.hold(keys, "test")
        client.send((held[number].found, held[number].offset))
    elif what == "release":
        held.pop(given[0]).release()
    elif what == "prefetch":
        handle = pages.prefetch(given[0])
        handle.wait(60)
        client.send(handle.progress.warm)
    elif what == "stats":
        client.send(store.stats()["host_cache"])
for each in held.values():
    each.release()
store.close()
"""


class ProcessTier:
    """A daemon in a process of its own. Its `prefetch` waits for the pages."""

    record_bytes = 8192

    def __init__(self, process: subprocess.Popen[str], connection: Connection) -> None:
        self.process, self._connection = process, connection
        self._lock = threading.Lock()
        self._size = connection.recv()
        fd = recv_handle(connection)
        self.view = SharedView(fd, self._size)
        os.close(fd)
        self.leases = self._number = 0

    def ask(self, what: str, *given: Any) -> Any:
        """None where the daemon is gone."""
        with self._lock:
            try:
                self._connection.send((what, *given))
                return self._connection.recv()
            except (OSError, EOFError):
                return None

    def lease(self, namespace: bytes, keys: U8, deadline: Deadline) -> Lease | None:
        self._number += 1
        number = self._number
        answer = self.ask("lease", number, np.array(keys))
        if answer is None:
            return None
        found, offset = answer
        return Lease(self, found, np.where(found, offset + self.view.address, 0).astype(np.uint64), number)

    def gave_back(self, lease: Lease) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(("release", lease.number))

    def prefetch(self, namespace: bytes, keys: U8, deadline_s: float) -> bool:
        return self.ask("prefetch", np.array(keys)) is not None

    def report(self, activity: Activity) -> bool:
        return False

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def daemon(path: Path) -> Iterator[ProcessTier]:
    """A process that has the store open, with a shared host cache."""
    address = str(path.parent / "daemon")
    process = start_python(DAEMON, path, address)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        tier = ProcessTier(process, Client(address, "AF_UNIX"))
        try:
            yield tier
        finally:
            tier.close()
            process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait(WAIT_S)

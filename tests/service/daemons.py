"""Real daemons on small stores, and processes that use them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gdsstore.bound import BoundNamespace
from gdsstore.node.client import NodeClient
from gdsstore.node.lease import DaemonLease
from gdsstore.store import Store
from gdsstore.waiting import Deadline
from tests.store.helpers import REPO, U8, make_keys, opaque, save, small_store

PATIENCE_S = 60.0  # far beyond what anything here takes
LIGHT = {
    "GDSSTORE_ENGINE": "posix",
    "GDSSTORE_POSIX_THREADS": "2",
    "GDSSTORE_WORKERS": "2",
    "GDSSTORE_STAGING_BYTES": "4MiB",
    "GDSSTORE_CHUNK_BYTES": "256KiB",
    "GDSSTORE_HUGE_PAGES": "off",
    "GDSSTORE_CATALOG_MAP_BYTES": "64MiB",
    "GDSSTORE_GRACE_S": "0",
}
CACHE = "16MiB"

T = TypeVar("T")


class Daemon:
    """A `gdsstore serve` in a process of its own. `log`: what it wrote to standard error."""

    def __init__(self, store: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.store = store
        self._log = store.parent / f"{store.name}-daemon.log"
        self._served_before = self.log.count("serving") if self._log.exists() else 0
        command = [sys.executable, "-m", "gdsstore.cli.main", "serve", "--store", str(store)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                cwd=REPO,
                env={**os.environ, **LIGHT, **(env or {})},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.pid = self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> Daemon:
        until(lambda: self.log.count("serving") > self._served_before or self.process.poll() is not None)
        assert self.process.poll() is None, self.log
        return self

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()


@contextlib.contextmanager
def serving(store: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Daemon]:
    """A daemon that is ready, and gone afterwards. Options are added to a small cache and no HTTP."""
    given = options if "--http" in options else (*options, "--no-http")
    daemon = Daemon(store, "--host-cache", CACHE, "--scrub-rate", "0", *given, env=env)
    try:
        yield daemon.wait_ready()
    finally:
        with contextlib.suppress(ProcessLookupError):
            daemon.process.send_signal(signal.SIGCONT)
        daemon.kill()


def until(true: Callable[[], object]) -> None:
    """Wait until it is."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def answered(ask: Callable[[], T | None]) -> T:
    """The first answer that is one: a daemon opens namespaces when they are first asked for, and a loaded machine is slow."""
    found: list[T] = []
    until(lambda: (answer := ask()) is not None and (found.append(answer) or True))
    return found[0]


def soon() -> Deadline:
    return Deadline(PATIENCE_S)


def filled(path: Path, pages: int = 64) -> tuple[Store, BoundNamespace, U8]:
    """An open store with pages, without a daemon's help of its own."""
    store = small_store(path, daemon="off")
    keys = make_keys(pages)
    namespace = opaque(store)
    assert save(namespace, keys).all_ok
    return store, namespace, keys


def prefetched(client: NodeClient, namespace: BoundNamespace, keys: U8) -> None:
    """Have these pages in the daemon's cache."""

    def all_warm() -> bool:
        number = answered(lambda: client.start_prefetch(namespace.digest, keys, 60.0))
        progress = answered(lambda: client.prefetch_progress(number, soon()))
        while progress.state in ("waiting", "running"):
            time.sleep(0.005)
            progress = answered(lambda: client.prefetch_progress(number, soon()))
        assert progress.state == "done"
        return progress.warm == len(keys)

    # One whose answer came too late is under way all the same, and the next one leaves its pages to it.
    until(all_warm)


def leased(client: NodeClient, namespace: BoundNamespace, keys: U8) -> DaemonLease:
    """A lease of pages that are all in the daemon's cache."""
    lease = answered(lambda: client.lease(namespace.digest, keys, soon()))
    assert lease.found.all()
    return lease


def leases(client: NodeClient) -> int:
    """How many the daemon knows of."""
    return int(client.status(soon())["daemon"]["leases"])

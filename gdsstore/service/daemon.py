"""The node daemon: one open store, its socket, its HTTP side and its scrub, from start to the end of the drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdsstore.config import Config
from gdsstore.memory.shared import SharedMemory
from gdsstore.node.connection import library_version
from gdsstore.service.errors_ring import ErrorRing
from gdsstore.service.handlers import Office
from gdsstore.service.listening import ListeningSocket, only_daemon
from gdsstore.service.namespaces import Namespaces
from gdsstore.service.node_totals import NodeTotals
from gdsstore.service.notify import Notifier
from gdsstore.service.scrub import Scrubber
from gdsstore.service.server import NodeServer
from gdsstore.service.sessions import House
from gdsstore.service.status import StatusBoard
from gdsstore.service.web import HttpAddress, Web
from gdsstore.store import Store

log = logging.getLogger("gdsstore.service")

THREADS = 4  # for calls that take a while
CLOSE_S = 30.0
STOP_SCRUB_S = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long a look-up waits for a thread of the store's that wants Python too; 5 ms by default.
SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """`http`: None: no HTTP. `scrub_bytes_per_s` 0: no scrub. `drain_s`: seconds, at the end, for what is under way."""

    http: HttpAddress | None
    scrub_bytes_per_s: int
    drain_s: float


def run_daemon(paths: list[Path], config: Config, options: DaemonOptions) -> bool:
    """Serve a store until SIGTERM or SIGINT; a second one ends the drain. Whether all that was under way ended in time.

    For the main thread of a process of its own. Raises StoreBusyError where another daemon serves the store, what
    `gdsstore.open` raises, StoreError where socket or address cannot be had, MissingExtraError.
    """
    sys.setswitchinterval(SWITCH_S)
    errors = ErrorRing()
    executor = ThreadPoolExecutor(THREADS, "gdsstore-node")
    with contextlib.ExitStack() as steps:
        steps.enter_context(only_daemon(paths[0]))
        steps.enter_context(errors.installed())
        steps.enter_context(_stopped_by_signals())
        store = Store(paths, config)
        steps.callback(store.close, CLOSE_S)
        # Not waited for: what hangs in the store has deadlines there, and `close` waits for it.
        steps.callback(executor.shutdown, wait=False, cancel_futures=True)
        memory = store.shared_memory()
        if memory is not None:
            store.moving()  # the first prefetch would hold up everybody while the engine is loaded
        return asyncio.run(Daemon(store, config, options, executor, errors).run(memory))
    return True  # a signal came before anybody was served


class Daemon:
    """What runs in the event loop."""

    def __init__(
        self,
        store: Store,
        config: Config,
        options: DaemonOptions,
        executor: ThreadPoolExecutor,
        errors: ErrorRing,
    ) -> None:
        self._store, self._options, self._executor = store, options, executor
        self._scrubber = (
            Scrubber(store, config, options.scrub_bytes_per_s) if options.scrub_bytes_per_s else None
        )
        self._node = NodeTotals(len(store.volumes))
        self._board = StatusBoard(store, self.facts, errors, self._node)
        self._started = time.monotonic()
        self._web: Web | None = None
        self._server: NodeServer | None = None
        self._draining = False

    def facts(self) -> Mapping[str, Any]:
        """What the status says of the daemon. Any thread may ask."""
        return {
            "pid": os.getpid(),
            "version": library_version(),
            "uptime_s": time.monotonic() - self._started,
            "draining": self._draining,
            "http": None if self._web is None else self._web.address,
            "scrub": None if self._scrubber is None else dataclasses.asdict(self._scrubber.facts),
            **({} if self._server is None else self._server.facts),
        }

    async def run(self, memory: SharedMemory | None) -> bool:
        """See `run_daemon`. `memory`: the store's, for clients."""
        stop, hurry = asyncio.Event(), asyncio.Event()
        _on_signals(stop, hurry)
        notifier = Notifier(os.environ)
        house = House(
            library_version(),
            self._store.uuid,
            None if memory is None else memory.fd,
            0 if memory is None else memory.size_bytes,
        )
        office = Office(
            Namespaces(self._store, self._executor),
            self._executor,
            self._board.latest,
            self._node,
            has_cache=memory is not None,
        )
        self._web = Web(self._store, self.facts, self._board, self._node, self._options.http)
        with contextlib.closing(ListeningSocket(self._store.directory.root)) as listening:
            server = self._server = NodeServer(listening, house, office)
            async with self._web.answering(), _signs_of_life(notifier):
                server.start()
                if self._scrubber is not None:
                    self._scrubber.start()
                note = f"serving {self._store.directory.root}"
                note += f", http://{self._web.address}/" if self._web.address else ""
                log.info(note)
                notifier.ready(note)
                await stop.wait()
                notifier.stopping()
                log.info("draining, at most %g s", self._options.drain_s)
                self._draining = True
                return await self._drain(server, hurry)

    async def _drain(self, server: NodeServer, hurry: asyncio.Event) -> bool:
        ended = await server.drain(self._options.drain_s, hurry)
        if not ended:
            log.warning("the drain was cut short: some clients still held records or waited for prefetches")
        if self._scrubber is not None:
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(self._executor, self._scrubber.stop, STOP_SCRUB_S):
                log.warning("the scrub did not end in time")
        return ended


class _Stopped(BaseException):
    pass


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Leave the `with` at a signal, until the event loop listens for them.

    To open a store and to touch all of its memory takes minutes, in which process 1 of a container would not even die of one.
    """

    def stop(number: int, frame: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    except _Stopped:
        log.info("stopped before it served anybody")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    def asked() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, asked)


@contextlib.asynccontextmanager
async def _signs_of_life(notifier: Notifier) -> AsyncIterator[None]:
    """Tell the service manager's watchdog, for the length of a `with`, that the event loop turns."""

    async def tell(interval_s: float) -> None:
        while True:
            notifier.alive()
            await asyncio.sleep(interval_s)

    interval_s = notifier.interval_s
    telling = None if interval_s is None else asyncio.create_task(tell(interval_s))
    try:
        yield
    finally:
        if telling is not None:
            telling.cancel()

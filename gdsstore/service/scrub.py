"""Reading everything that a store holds, slowly, in idle time: damage is found, and dropped, before somebody wants the page."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import wait
from dataclasses import dataclass

from gdsstore.config import Config
from gdsstore.engines.choose import make_engine
from gdsstore.errors import GdsStoreError
from gdsstore.service.scrub_place import ScrubPlace
from gdsstore.sizes import MiB
from gdsstore.store import Store
from gdsstore.transfer.policy_terms import TransferClass
from gdsstore.verify.online import verify_online
from gdsstore.verify.payloads import PayloadReader
from gdsstore.verify.result import Verification
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.service")

BETWEEN_PASSES_S = 3600.0
CHUNK_BYTES = 4 * MiB  # read at once: small, so that loads hardly notice
TURN_S = 1.0  # how long a chunk waits for loads to let it pass, at most
IN_FLIGHT = 4


class _Stopped(Exception):  # noqa: N818 - nothing went wrong
    pass


@dataclass(slots=True)
class ScrubFacts:
    """Of this process. `damaged`: pieces of damage that were found. `last_pass_s`: when the last pass over all segments ended, of
    this daemon or of one before it, as Unix time; None: not known."""

    passes: int = 0
    bytes_read: int = 0
    damaged: int = 0
    last_pass_s: float | None = None


class Scrubber:
    """A thread that reads `bytes_per_s` of segment files, and less while loads and saves wait. It begins where the last one was."""

    def __init__(self, store: Store, config: Config, bytes_per_s: int) -> None:
        self._store, self._bytes_per_s = store, bytes_per_s
        chunk = min(CHUNK_BYTES, config.chunk_bytes)
        self._config = dataclasses.replace(
            config, chunk_bytes=chunk, in_flight_ranges=IN_FLIGHT, posix_threads=1
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gdsstore-scrub", daemon=True)
        self._at = 0
        self._place = ScrubPlace(store.directory.root)
        self.facts = ScrubFacts(last_pass_s=self._place.last_pass_s)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Whether it ended in time; it does with the chunk that it reads."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            wait_s = BETWEEN_PASSES_S
            try:
                self._pass()
            except _Stopped:
                self._place.keep()
                return
            except (GdsStoreError, OSError) as error:
                log.warning("the scrub of the store was given up for now: %s", error)

    def _pass(self) -> None:
        config = self._config
        engine = make_engine(
            config.engine, posix_threads=config.posix_threads, in_flight_ranges=config.in_flight_ranges
        )
        self._at = 0
        with PayloadReader(engine, self._store.volumes, self._store.segment_bytes, config) as reader:
            found = verify_online(
                self._store,
                reader,
                repair=True,
                progress=self._advance,
                first=self._place.segment,
                enter=self._place.enter,
            )
        self._place.passed()
        self._report(found)

    def _advance(self, done: int, total: int) -> None:
        """Called behind each chunk: wait until the next one is due, and nothing more urgent is in line."""
        if self._stop.is_set():
            raise _Stopped
        read, self._at = done - self._at, done
        if done % self._store.segment_bytes == 0:
            return  # on to the next segment, over what nobody wrote
        self.facts.bytes_read += read
        due = time.monotonic() + read / self._bytes_per_s
        turn = self._store.submit(
            lambda admission: None, TransferClass.MAINTENANCE, read, Deadline(TURN_S), lambda state: None
        )
        wait([turn], 2 * TURN_S)
        if self._stop.wait(max(0.0, due - time.monotonic())):
            raise _Stopped

    def _report(self, result: Verification) -> None:
        self.facts.passes += 1
        self.facts.last_pass_s = self._place.last_pass_s
        self.facts.damaged += len(result.damaged)
        for damage in result.damaged:
            log.error("scrub: %s, segment %d: %s", damage.file, damage.segment, damage.what)
        log.info(
            "scrub: %d pages in %d segments are read, %d damaged",
            result.pages_checked,
            result.segments,
            len(result.damaged),
        )

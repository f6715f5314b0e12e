"""What a store does in the background: syncs, lets go of stuck I/O, tries sick volumes, tells the daemon of the node what
this process did and, if this process is the maintainer, keeps room ready."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gdsstore.config import Durability
from gdsstore.errors import DeadlineError, GdsStoreError
from gdsstore.sick_volumes import LOOK_S, SickVolumes
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.store_core import StoreCore

log = logging.getLogger("gdsstore.store")

REAP_EVERY_S = 30.0
SYNC_WAIT_S = 1.0
REPORT_S = 1.0  # between two reports to the daemon of the node
MAX_UNSYNCED_SEGMENTS = 64  # each keeps a file open


class Upkeep:
    """One daemon thread a store, started by its first use for writing or reading."""

    def __init__(self, store: StoreCore) -> None:
        self._store = store
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gdsstore-upkeep", daemon=True)
        self._sick_volumes, self._some_sick = SickVolumes(store), False
        self._maintainer = self._sync_late = False
        self._next_sync = time.monotonic() + store.config.sync_interval_s
        self._next_reap = 0.0

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """Take the next turn now. Only sets a flag: safe to call with any lock held."""
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end; whether it did in time."""
        deadline = Deadline(timeout_s)
        self._stop.set()
        self._wake.set()
        self._sick_volumes.stop(deadline.left_s)
        self._thread.join(deadline.left_s)
        return not self._thread.is_alive()

    @property
    def is_maintainer(self) -> bool:
        return self._maintainer

    def _run(self) -> None:
        turn, report = self._pause(), Deadline(REPORT_S)
        while not self._stop.is_set():
            self._wake.wait(min(turn.left_s, report.left_s))
            if self._stop.is_set():
                return
            if self._wake.is_set() or turn.passed:
                self._wake.clear()
                _try(self.turn)
                turn = self._pause()
            if report.passed:
                _try(self._report)
                report = Deadline(REPORT_S)

    def _pause(self) -> Deadline:
        """Until the next turn."""
        interval_s = self._store.config.maintain_interval_s
        return Deadline(min(interval_s, LOOK_S) if self._some_sick else interval_s)

    def _report(self) -> None:
        self._store.nodes.report(self._store.activity)

    def turn(self) -> None:
        """One round of everything that is due."""
        store = self._store
        self._some_sick = self._sick_volumes.look()
        store.sweep()
        now = time.monotonic()
        due = store.config.durability is Durability.INTERVAL and now >= self._next_sync
        if due or store.pool.unsynced_segments > MAX_UNSYNCED_SEGMENTS:
            self._next_sync = now + store.config.sync_interval_s
            _try(self._sync)
        if not store.config.maintain:
            return
        self._maintainer = self._maintainer or store.locks.try_maintainer()
        if not self._maintainer:
            return
        if now >= self._next_reap:
            self._next_reap = now + REAP_EVERY_S
            store.catalog.reap_dead_readers()
        if store.reclaimer.shrink() or not store.writing:
            return
        self._make_room()

    def _sync(self) -> None:
        """Wait for the drives a little, and not at all where one was late the last time: there is other work, and they go on."""
        was_late, self._sync_late = self._sync_late, True
        try:
            self._store.pool.sync(Deadline(0.0 if was_late else SYNC_WAIT_S))
        except DeadlineError:  # who is late for long is told of by the pool
            return
        except BaseException:
            self._sync_late = False
            raise
        self._sync_late = False

    def _make_room(self) -> None:
        """One step towards `free_segments` ready ones: on each volume while the store grows, or a save would now and then have to
        make its segment itself."""
        store, wanted = self._store, self._store.config.free_segments
        ready = store.reclaimer.ready()
        short = [i for i, free in enumerate(ready.free) if free < wanted and store.placement.usable(i)]
        grown = None
        if short and ready.may_grow:
            least = min(ready.free[i] for i in short)
            grown = store.pool.grow(store.placement.roomiest([i for i in short if ready.free[i] == least]))
        if grown is None and sum(ready.free) < wanted:
            store.reclaimer.reclaim_one()


def _try(step: Callable[[], None]) -> None:
    try:
        step()
    except (GdsStoreError, OSError) as error:
        log.error("upkeep: %s", error)  # the next time it is tried again
    except Exception:  # a bug: without upkeep nothing would be made durable, and no drive come back
        log.exception("upkeep failed")

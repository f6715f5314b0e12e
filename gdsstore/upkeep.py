"""What a store does in the background: syncs, lets go of stuck I/O, tries sick volumes and, if this process is the maintainer,
keeps room ready."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from gdsstore.config import Durability
from gdsstore.errors import GdsStoreError
from gdsstore.sick_volumes import LOOK_S, SickVolumes
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.store import Store

log = logging.getLogger("gdsstore.store")

REAP_EVERY_S = 30.0
MAX_UNSYNCED_SEGMENTS = 64  # each keeps a file open


class Upkeep:
    """One daemon thread a store, started by its first use for writing or reading."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gdsstore-upkeep", daemon=True)
        self._sick_volumes, self._some_sick = SickVolumes(store), False
        self._maintainer = False
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
        while not self._stop.is_set():
            interval_s = self._store.config.maintain_interval_s
            self._wake.wait(min(interval_s, LOOK_S) if self._some_sick else interval_s)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self.turn()
            except GdsStoreError as error:
                log.error("upkeep: %s", error)  # the next turn tries again
            except OSError as error:
                log.error("upkeep: %s", error)

    def turn(self) -> None:
        """One round of everything that is due."""
        store = self._store
        self._some_sick = self._sick_volumes.look()
        store.sweep()
        now = time.monotonic()
        due = store.config.durability is Durability.INTERVAL and now >= self._next_sync
        if due or store.pool.unsynced_segments > MAX_UNSYNCED_SEGMENTS:
            self._next_sync = now + store.config.sync_interval_s
            store.pool.sync()
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

"""A store on two drives, one of which can be made sick while the store is in use, and threads that use both."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gdsstore import BoundNamespace, PageStatus, Store
from gdsstore.catalog.keys import index_keys
from gdsstore.engines.base import RangePlan
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from tests.store.helpers import U8, WAIT_S, make_keys, opaque, truth

PAGE_BYTES = 8192
PAGES = 16  # of a prompt: one chunk, so on one drive


class Sickness(StrEnum):
    HANGS = "hangs"
    ERRS = "errs"
    CRAWLS = "crawls"


FAULTS = {
    Sickness.HANGS: Fault(FaultKind.HANG),
    Sickness.ERRS: Fault(FaultKind.ERRNO),
    Sickness.CRAWLS: Fault(FaultKind.DELAY, delay_s=0.4),
}


class Drives:
    """An engine for both drives. The second one is sick while `sick` is true."""

    def __init__(self, path: Path, sickness: Sickness) -> None:
        self.paths = [path / "well", path / "sick"]
        self.sick = False
        fault = FAULTS[sickness]
        self.engine = FaultyEngine(
            PosixEngine(4), [Fault(fault.kind, match=self._hit, delay_s=fault.delay_s)], seed=0
        )

    def _hit(self, plan: RangePlan) -> npt.NDArray[np.bool_]:
        if not self.sick:
            return np.zeros(len(plan), np.bool_)
        fds, inverse = np.unique(plan.fd, return_inverse=True)
        mine = [os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.paths[1])) for fd in fds.tolist()]
        return np.array(mine, np.bool_)[inverse]

    @contextlib.contextmanager
    def being_sick(self) -> Iterator[None]:
        self.sick = True
        try:
            yield
        finally:
            self.sick = False
            self.engine.release_hangs()


def volume_of(pages: BoundNamespace, keys: U8) -> set[int]:
    """The drives that pages lie on."""
    where, rows = pages._store.catalog.locate(*index_keys(keys, pages.digest))
    return {rows[segment].volume for segment in np.unique(where.segment[where.found]).tolist()}


@dataclass
class Seen:
    """What the threads saw. Lists hold (when it began, how long it took, outcome by name) of each call, by drive or of saves."""

    loads: dict[int, list[tuple[float, float, str]]] = field(default_factory=lambda: {0: [], 1: []})
    saves: list[tuple[float, float, str]] = field(default_factory=list)
    wrong: int = 0

    def of(self, drive: int, start: float, end: float = float("inf")) -> list[str]:
        """Outcomes of the loads from one drive that began in a time."""
        return [outcome for began, _, outcome in self.loads[drive] if start <= began < end]

    def saved(self, start: float, end: float = float("inf")) -> list[str]:
        return [outcome for began, _, outcome in self.saves if start <= began < end]


class Replay:
    """Threads that load prompts from each drive, and one that saves new ones, until the end of a `with`."""

    def __init__(self, store: Store, deadline_s: float, threads: int = 2) -> None:
        self._pages, self._deadline_s, self._threads = opaque(store, PAGE_BYTES), deadline_s, threads
        self.seen = Seen()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.prompts: dict[int, list[U8]] = {0: [], 1: []}
        number = 0
        while min(map(len, self.prompts.values())) < 6:
            keys = make_keys(PAGES, f"prompt {number}")
            number += 1
            assert self._pages.save(keys, truth(keys, PAGE_BYTES)).result(WAIT_S).all_ok
            on = volume_of(self._pages, keys)
            if len(on) == 1:
                self.prompts[on.pop()].append(keys)
        self._running = [
            *(threading.Thread(target=self._load, args=(i % 2, i)) for i in range(2 * threads)),
            threading.Thread(target=self._save),
        ]

    def _load(self, drive: int, number: int) -> None:
        while not self._over.is_set():
            number += 1
            keys = self.prompts[drive][number % len(self.prompts[drive])]
            memory = np.full((PAGES, PAGE_BYTES), 0xEE, np.uint8)
            start = time.monotonic()
            result = self._pages.load(keys, memory, deadline_s=self._deadline_s).result(WAIT_S)
            took = time.monotonic() - start
            wrong = int((result.ok & (memory != truth(keys, PAGE_BYTES)).any(axis=1)).sum())
            with self._lock:
                self.seen.wrong += wrong
                self.seen.loads[drive].append((start, took, _worst(result.status)))
            self._over.wait(0.002)

    def _save(self) -> None:
        number = 0
        while not self._over.wait(0.01):
            number += 1
            keys = make_keys(PAGES, f"new {number}")
            start = time.monotonic()
            result = self._pages.save(keys, truth(keys, PAGE_BYTES), deadline_s=self._deadline_s).result(
                WAIT_S
            )
            with self._lock:
                self.seen.saves.append((start, time.monotonic() - start, _worst(result.status)))

    def __enter__(self) -> Replay:
        for thread in self._running:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._running:
            thread.join(WAIT_S)


def _worst(status: npt.NDArray[np.uint8]) -> str:
    return PageStatus(int(status.max())).name

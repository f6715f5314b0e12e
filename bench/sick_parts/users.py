"""Threads that use both drives, and what they saw."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import gdsstore
from gdsstore.replay.truth import U8, count_wrong
from sick_parts.drives import SICK, WELL

PAGE_BYTES, PAGES = 256 << 10, 16  # a prompt of 4 MiB: one chunk, so on one drive
PROMPTS = 8  # on each drive
THREADS = 3  # for each drive
DEADLINE_S = 2.0
GIVE_UP_S = 60.0


@dataclass
class Loads:
    """What the threads of one drive have done since the last `take`."""

    nbytes: int = 0
    longest_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)


class Users:
    """Threads that load prompts of one drive each, one after the other, and check every byte."""

    def __init__(self, pages: gdsstore.BoundNamespace, prompts: list[list[U8]]) -> None:
        self._pages, self._prompts = pages, prompts
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._loads = [Loads(), Loads()]
        self.wrong = 0
        self._threads = [
            threading.Thread(target=self._use, args=(drive, i))
            for drive in (WELL, SICK)
            for i in range(THREADS)
        ]

    def _use(self, drive: int, number: int) -> None:
        memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        while not self._over.is_set():
            number += 1
            keys = self._prompts[drive][number % PROMPTS]
            memory[:, ::4096] = 0
            start = time.monotonic()
            result = self._pages.load(keys, memory, deadline_s=DEADLINE_S).result(GIVE_UP_S)
            took_s = time.monotonic() - start
            wrong = int(result.ok[count_wrong(keys, memory)].sum())
            with self._lock:
                mine = self._loads[drive]
                self.wrong += wrong
                mine.nbytes += int(result.ok.sum()) * PAGE_BYTES
                mine.longest_s = max(mine.longest_s, took_s)
                mine.outcomes.update(result.reasons())
            if result.memory_in_use:
                memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
            if not result.ok.any():
                self._over.wait(0.01)  # a server would compute meanwhile

    def during(self, wait: Callable[[], None]) -> tuple[list[Loads], float]:
        """What they do while `wait` waits, and for how long that was."""
        with self._lock:
            self._loads = [Loads(), Loads()]
        start = time.monotonic()
        wait()
        with self._lock:
            return self._loads, time.monotonic() - start

    def loaded(self, drive: int) -> int:
        """Bytes that came from a drive since `during` began."""
        with self._lock:
            return self._loads[drive].nbytes

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(GIVE_UP_S)

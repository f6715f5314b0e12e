"""Threads that save and load all the time, check every byte that they get, and note what they saw."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

import gdsstore
from gdsstore.drill.plan import DEADLINE_S, PAGE_BYTES, PROMPT_PAGES, SLACK_S
from gdsstore.replay.truth import KEY_BYTES, U8, count_wrong, fill_pages, spoil
from gdsstore.transfer.results import CallResult

LOADERS = 3
SAVE_PAGES = 4
SAVE_EVERY_S = 0.05
SAVE_BYTES = 256 << 20  # in all; then what was saved is saved again, and the store does not fill up
GIVE_UP_S = 5 * DEADLINE_S  # a call that has not ended then never does
JOIN_S = 2 * GIVE_UP_S

R = TypeVar("R", bound=CallResult)


@dataclass(slots=True)
class Seen:
    """What the calls came to."""

    calls: int = 0
    late_calls: int = 0
    longest_call_s: float = 0.0
    pages_loaded: int = 0
    pages_saved: int = 0
    wrong_pages: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # pages, by reason
    failed_saves: Counter[str] = field(default_factory=Counter)  # pages, by reason
    errors: list[str] = field(default_factory=list)  # what ended a thread

    def note(self, result: CallResult, wrong: int = 0) -> None:
        for name, pages in result.reasons().items():
            if name.startswith("MISS"):
                self.misses[name] += pages
            elif name.startswith("FAILED"):
                self.failed_saves[name] += pages
            elif name == "LOADED":
                self.pages_loaded += pages
            else:
                self.pages_saved += pages
        self.wrong_pages += wrong


def new_buffer(pages: int) -> U8:
    return np.zeros((pages, PAGE_BYTES), np.uint8)


def random_keys(rng: np.random.Generator, pages: int) -> U8:
    return rng.integers(0, 256, (pages, KEY_BYTES), np.uint8)


class Traffic:
    """The threads, from `start` to `stop`. `prompts`: keys that are saved, each a load."""

    def __init__(self, pages: gdsstore.BoundNamespace, prompts: Sequence[U8]) -> None:
        self._pages, self._prompts = pages, prompts
        self.seen = Seen()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._kept: list[tuple[CallResult, U8]] = []  # memory that the drive may still use
        self._threads = [
            threading.Thread(
                target=self._guarded, args=(number,), name=f"gdsstore-drill-{number}", daemon=True
            )
            for number in range(LOADERS + 1)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads. One that does not end is noted as a late call."""
        self._over.set()
        end = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            self.seen.late_calls += sum(thread.is_alive() for thread in self._threads)

    def load(self, keys: U8, memory: U8) -> tuple[gdsstore.LoadResult | None, U8]:
        """One load, noted and checked; and the memory for the next one, since a drive may still use this one."""
        spoil(memory)
        result = self._timed(self._pages.load(keys, memory, deadline_s=DEADLINE_S))
        if result is None:
            return None, new_buffer(len(memory))
        wrong = int(result.ok[count_wrong(keys, memory)].sum())
        with self._lock:
            self.seen.note(result, wrong)
        return result, self._after(result, memory)

    def save(self, keys: U8, memory: U8) -> tuple[gdsstore.SaveResult | None, U8]:
        """One save, noted; and the memory for the next one."""
        fill_pages(keys, memory)
        result = self._timed(self._pages.save(keys, memory, deadline_s=DEADLINE_S))
        if result is None:
            return None, new_buffer(len(memory))
        with self._lock:
            self.seen.note(result)
        return result, self._after(result, memory)

    def _after(self, result: CallResult, memory: U8) -> U8:
        if not result.memory_in_use:
            return memory
        with self._lock:
            self._kept.append((result, memory))
        return new_buffer(len(memory))

    def _timed(self, future: Future[R]) -> R | None:
        """The result of a call; None for one that does not end."""
        began_s = time.monotonic()
        try:
            result: R | None = future.result(GIVE_UP_S)
        except FutureTimeout:
            result = None
        took_s = time.monotonic() - began_s
        with self._lock:
            seen = self.seen
            seen.calls += 1
            seen.late_calls += took_s > DEADLINE_S + SLACK_S
            seen.longest_call_s = max(seen.longest_call_s, took_s)
        return result

    # --- the threads ---

    def _guarded(self, number: int) -> None:
        try:
            if number < LOADERS:
                self._load_all(number)
            else:
                self._save_all(np.random.default_rng(number))
        except Exception as error:  # the report is to say so
            with self._lock:
                self.seen.errors.append(f"{type(error).__name__}: {error}")

    def _load_all(self, number: int) -> None:
        memory = new_buffer(PROMPT_PAGES)
        while not self._over.is_set():
            number += 1
            result, memory = self.load(self._prompts[number % len(self._prompts)], memory)
            if result is None:
                return
            if not result.ok.all():
                self._over.wait(0.01)  # a server would compute what missed

    def _save_all(self, rng: np.random.Generator) -> None:
        memory, saved = new_buffer(SAVE_PAGES), list[U8]()
        while not self._over.wait(SAVE_EVERY_S):
            known = len(saved) * SAVE_PAGES * PAGE_BYTES >= SAVE_BYTES
            keys = saved[int(rng.integers(len(saved)))] if known else random_keys(rng, SAVE_PAGES)
            result, memory = self.save(keys, memory)
            if result is None:
                return
            if result.all_ok and not known:
                saved.append(keys)
            if result.all_ok and self.load(keys, new_buffer(SAVE_PAGES))[0] is None:
                return

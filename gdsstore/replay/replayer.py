"""One worker's replay: for each request look up, load and check what is there, save the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gdsstore.errors import DeadlineError
from gdsstore.replay.requests import Request
from gdsstore.replay.truth import U8, PageKeys, count_wrong, fill_pages, spoil
from gdsstore.transfer.results import PageStatus

T = TypeVar("T")

_EXAMPLES = 8  # keys of wrong pages that are kept for the report


class PageResult(Protocol):
    """What a replay needs of a save's or a load's result."""

    @property
    def ok(self) -> npt.NDArray[np.bool_]: ...

    @property
    def memory_in_use(self) -> bool: ...

    def reasons(self) -> dict[str, int]: ...


class PageNamespace(Protocol):
    """What a replay needs of a store's namespace."""

    def lookup(self, keys: U8) -> int: ...

    def load(self, keys: U8, pages: U8) -> Future[Any]: ...  # of a PageResult; so is save

    def save(self, keys: U8, pages: U8) -> Future[Any]: ...


@dataclass(slots=True)
class Tally:
    """What one worker saw. Times are in seconds, as its one thread spent them; one number a request."""

    requests: int = 0
    pages: int = 0
    pages_hit: int = 0
    pages_loaded: int = 0
    pages_verified: int = 0
    wrong_pages: int = 0
    wrong_keys: list[str] = field(default_factory=list)  # the first few, hex
    misses: Counter[str] = field(default_factory=Counter)  # pages by reason
    saves: Counter[str] = field(default_factory=Counter)  # pages by outcome
    lookup_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    own_cpu_s: float = 0.0  # CPU of the replay itself: trace, keys, true bytes, checks


class Replayer:
    """Drives one namespace, one request at a time, through one buffer of page rows."""

    def __init__(self, namespace: PageNamespace, new_buffer: Callable[[], U8], deadline_s: float) -> None:
        """`new_buffer` gives uint8[n, page_bytes]; a request of more than n pages goes in several calls.

        `deadline_s` bounds the wait for each call; it should exceed the store's own, which yields misses.
        """
        self.tally = Tally()
        self._namespace = namespace
        self._new_buffer = new_buffer
        self._buffer = new_buffer()
        self._set_aside: list[tuple[PageResult, U8]] = []
        self._deadline_s = deadline_s
        self._keys = PageKeys()
        self._store_cpu_s = 0.0  # CPU of this thread inside the store

    def run(self, requests: Iterable[Request], on_step: Callable[[], None]) -> None:
        """Replay the requests; `on_step` is called after each call to the store.

        Raises DeadlineError if the store does not answer in time, and what the store raises.
        """
        began_cpu_s, began_store_cpu_s = time.thread_time(), self._store_cpu_s
        for request in requests:
            self._replay(request, on_step)
            self.tally.requests += 1
            on_step()
        spent_cpu_s = time.thread_time() - began_cpu_s
        self.tally.own_cpu_s += spent_cpu_s - (self._store_cpu_s - began_store_cpu_s)

    def _replay(self, request: Request, on_step: Callable[[], None]) -> None:
        tally = self.tally
        keys = self._keys.of(request.blocks, request.session)
        tally.pages += len(keys)
        if len(keys) == 0:
            return
        found, seconds = self._timed(lambda: self._namespace.lookup(keys))
        tally.lookup_s.append(seconds)
        tally.misses["not found"] += len(keys) - found

        hit = self._load(keys[:found], on_step)
        tally.pages_hit += hit
        self._save(keys[hit:], on_step)

    def _load(self, keys: U8, on_step: Callable[[], None]) -> int:
        """Load and check pages; how many from the start came, with the right bytes."""
        tally = self.tally
        good = np.zeros(len(keys), dtype=np.bool_)
        spent_s = 0.0
        rows = len(self._buffer)
        for at in range(0, len(keys), rows):
            some = keys[at : at + rows]
            pages = self._buffer[: len(some)]
            spoil(pages)
            result, seconds = self._timed(partial(self._call, self._namespace.load, some, pages))
            spent_s += seconds
            good[at : at + len(some)] = self._check(some, pages, result)
            self._retire_buffer(result)
            on_step()
        if len(keys):
            tally.load_s.append(spent_s)
        return len(keys) if good.all() else int(good.argmin())

    def _check(self, keys: U8, pages: U8, result: PageResult) -> npt.NDArray[np.bool_]:
        """Compare what was loaded with the truth; which pages came with the right bytes."""
        tally = self.tally
        wrong = count_wrong(keys, pages)
        wrong = wrong[result.ok[wrong]]  # the memory of a page that missed may hold anything
        loaded = int(result.ok.sum())
        tally.pages_loaded += loaded
        tally.pages_verified += loaded - len(wrong)
        tally.wrong_pages += len(wrong)
        tally.wrong_keys += [keys[i].tobytes().hex() for i in wrong[: _EXAMPLES - len(tally.wrong_keys)]]
        tally.misses.update(
            {name: n for name, n in result.reasons().items() if name != PageStatus.LOADED.name}
        )
        good = result.ok.copy()
        good[wrong] = False
        return good

    def _save(self, keys: U8, on_step: Callable[[], None]) -> None:
        tally = self.tally
        spent_s = 0.0
        rows = len(self._buffer)
        for at in range(0, len(keys), rows):
            some = keys[at : at + rows]
            pages = self._buffer[: len(some)]
            fill_pages(some, pages)
            result, seconds = self._timed(partial(self._call, self._namespace.save, some, pages))
            spent_s += seconds
            tally.saves.update(result.reasons())
            self._retire_buffer(result)
            on_step()
        if len(keys):
            tally.save_s.append(spent_s)

    def _retire_buffer(self, result: PageResult) -> None:
        """Take another buffer if the drive may still use this one, which only a deadline can bring about."""
        if not result.memory_in_use:
            return
        self._set_aside.append((result, self._buffer))
        for at, (owner, buffer) in enumerate(self._set_aside):
            if not owner.memory_in_use:
                self._buffer = buffer
                del self._set_aside[at]
                return
        self._buffer = self._new_buffer()

    def _timed(self, call: Callable[[], T]) -> tuple[T, float]:
        """What a call to the store returns, and the seconds it took."""
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        result = call()
        self._store_cpu_s += time.thread_time() - began_cpu_s
        return result, time.monotonic() - began_s

    def _call(self, method: Callable[[U8, U8], Future[Any]], keys: U8, pages: U8) -> PageResult:
        future = method(keys, pages)
        try:
            result: PageResult = future.result(self._deadline_s)
            return result
        except FutureTimeout:
            if future.done():  # the store's own error is a TimeoutError too
                raise
            raise DeadlineError(
                "the store did not end a save or load in time", deadline_s=self._deadline_s
            ) from None

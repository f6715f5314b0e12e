"""The store's side of a replay with time: real loads and saves in threads of their own, every loaded byte checked.

What is loaded is not kept: the modelled GPU has no memory to put it. So a load needs two buffers, whatever its size.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gdsstore.costing import leading
from gdsstore.errors import DeadlineError, GdsStoreError
from gdsstore.replay.replayer import PageResult
from gdsstore.replay.timed_pages import Namespace, StoreLoading, StorePrefetching
from gdsstore.replay.truth import U8, count_wrong, fill_pages, spoil
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.replay")

CHUNK_S = 0.1  # of loading, after which a load can be given up
FIRST_RATE = 2e8  # bytes a second, until something was loaded
SAVE_BUDGET_S = 5.0  # a save that waits longer is dropped, or a slow drive would work on old pages only
STOP_S = 60.0


@dataclass(slots=True)
class TimedTally:
    """What moved. Each field is written by one thread."""

    pages_loaded: int = 0
    load_s: float = 0.0
    wrong_pages: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # pages by reason
    pages_saved: int = 0
    saves_dropped: int = 0  # pages


def save_now(namespace: Namespace, keys: U8, buffer: U8) -> None:
    """Save pages before the replay begins, and wait for it."""
    for at in range(0, len(keys), len(buffer)):
        some = keys[at : at + len(buffer)]
        fill_pages(some, buffer[: len(some)])
        namespace.save(some, buffer[: len(some)], deadline_s=STOP_S).result(2 * STOP_S)


class TimedStore:
    """Loads one chunk at a time, and saves in the background."""

    def __init__(
        self, namespace: Namespace, new_buffer: Callable[[], U8], deadline_s: float, block_tokens: int
    ) -> None:
        """`new_buffer` gives uint8[n, page_bytes]; a page holds `block_tokens` tokens."""
        self._namespace, self._new_buffer, self._deadline_s = namespace, new_buffer, deadline_s
        self._block_tokens = block_tokens
        self.tally = TimedTally()
        self._change = threading.Condition()
        self._loads: deque[StoreLoading] = deque()
        self._prefetches: list[StorePrefetching] = []
        self._saves: queue.SimpleQueue[tuple[U8, Deadline] | None] = queue.SimpleQueue()
        self._stop = False
        self._rate = FIRST_RATE
        self._buffers = [new_buffer(), new_buffer()]
        self._save_buffer = new_buffer()
        self._page_bytes: int = self._buffers[0].shape[1]
        self._abandoned: list[tuple[PageResult, U8]] = []  # buffers that the drive may still use
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"gdsstore-replay-{name}", daemon=True)
            for name, work in (("load", self._load_all), ("save", self._save_all))
        ]
        for thread in self._threads:
            thread.start()

    # --- for the server ---

    def lookup(self, keys: U8) -> int:
        self._raise_failure()
        if len(keys) == 0:
            return 0
        found: int = self._namespace.lookup(keys)
        return found

    def load(self, keys: U8) -> StoreLoading:
        self._raise_failure()
        loading = StoreLoading(keys)
        with self._change:
            self._loads.append(loading)
            self._change.notify_all()
        return loading

    def prefetch(self, keys: U8, input_tokens: int, wait_s: float) -> StorePrefetching | None:
        self._raise_failure()
        found = leading(self._namespace.contains(keys)) if len(keys) else 0
        if not found:
            return None
        self._prefetches = [each for each in self._prefetches if each.left]
        worth = self._namespace.advise(
            found,
            rest_tokens=max(0, input_tokens - found * self._block_tokens),
            wait_s=wait_s,
            queued_bytes=self._page_bytes * sum(each.left for each in self._prefetches),
        ).load_pages
        if not worth:
            return None
        handle = self._namespace.prefetch(keys[:worth], deadline_s=self._deadline_s)
        self._prefetches.append(StorePrefetching(handle, worth))
        return self._prefetches[-1]

    def save(self, keys: U8) -> None:
        self._saves.put((keys, Deadline(SAVE_BUDGET_S)))

    def close(self) -> None:
        """End what is under way and drop the rest. Raises what a thread ended with."""
        with self._change:
            self._stop = True
            self._change.notify_all()
        self._saves.put(None)
        deadline = Deadline(STOP_S)
        for thread in self._threads:
            thread.join(deadline.left_s)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- the threads ---

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except GdsStoreError as error:
            self._failure = error
        except FutureTimeout:
            self._failure = DeadlineError(
                "the store did not end a save or load in time", deadline_s=self._deadline_s
            )
        except Exception as error:  # the server learns of it at its next call
            self._failure = error
        finally:
            with self._change:
                for loading in self._loads:
                    loading.cancel()  # nobody is to wait for what does not come

    def _load_all(self) -> None:
        unchecked: Callable[[], None] | None = None
        while (loading := self._next(wait=unchecked is None)) is not None or unchecked is not None:
            if loading is not None:
                unchecked = self._load_chunk(loading, unchecked or _nothing)
                self._buffers.reverse()
            elif unchecked is not None:
                unchecked()
                unchecked = None

    def _next(self, *, wait: bool) -> StoreLoading | None:
        """What to load next. None: nothing, and for ever if `wait`."""
        with self._change:
            while not self._stop:
                while self._loads and self._loads[0].done:
                    self._loads.popleft()
                if self._loads:
                    return self._loads[0]
                if not wait:
                    return None
                self._change.wait()
            return None

    def _load_chunk(self, loading: StoreLoading, check_last: Callable[[], None]) -> Callable[[], None]:
        """Load the next pages of a request, while what came last is checked. Returns what checks these."""
        rows = int(min(max(1, self._rate * CHUNK_S // self._page_bytes), len(self._buffers[0])))
        keys = loading.keys[loading.asked : loading.asked + rows]
        pages = self._buffers[0][: len(keys)]
        spoil(pages)
        began_s = time.monotonic()
        ended_s: list[float] = []
        future = self._namespace.load(keys, pages, deadline_s=self._deadline_s)
        future.add_done_callback(lambda _: ended_s.append(time.monotonic()))
        check_last()
        result: PageResult = future.result(2 * self._deadline_s)
        took_s = (ended_s[0] if ended_s else time.monotonic()) - began_s
        ok = result.ok
        good = len(ok) if ok.all() else int(ok.argmin())
        loading.asked += len(keys)
        loading.ready += good
        if good < len(keys) or loading.asked == loading.pages:
            loading.cancel()
        self._rate = len(keys) * self._page_bytes / took_s
        tally = self.tally
        tally.pages_loaded += int(ok.sum())
        tally.load_s += took_s
        tally.misses.update({name: n for name, n in result.reasons().items() if name.startswith("MISS")})
        if result.memory_in_use:
            self._abandoned.append((result, self._buffers[0]))
            self._buffers[0] = self._new_buffer()
        return lambda: self._check(keys, pages, ok)

    def _check(self, keys: U8, pages: U8, ok: npt.NDArray[np.bool_]) -> None:
        wrong = count_wrong(keys, pages)
        self.tally.wrong_pages += int(ok[wrong].sum())  # the memory of a page that missed may hold anything

    def _save_all(self) -> None:
        buffer = self._save_buffer
        rows = max(1, len(buffer) // 4)
        while (job := self._saves.get()) is not None:
            keys, deadline = job
            for at in range(0, len(keys), rows):
                if deadline.passed or self._stop:
                    self.tally.saves_dropped += 0 if self._stop else len(keys) - at
                    break
                some = keys[at : at + rows]
                fill_pages(some, buffer[: len(some)])
                future = self._namespace.save(some, buffer[: len(some)], deadline_s=self._deadline_s)
                result: PageResult = future.result(2 * self._deadline_s)
                self.tally.pages_saved += result.reasons().get("SAVED", 0)
                if result.memory_in_use:
                    self._abandoned.append((result, buffer))
                    buffer = self._new_buffer()


def _nothing() -> None:
    pass

"""Prefetches: the pages of requests that wait, on their way into the store's host cache while the GPU works for others.

A look-up of the scheduler's only leaves a note here; a thread of this module's asks the store. When the request's load begins, what
is still on its way is left to the load, which reads it layer by layer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias

import numpy as np

from gdsstore import GdsStoreError, LoadResult, PageStatus, Prefetch
from sglang_backend.device_pools_kinds import KV
from sglang_backend.linker_pools import U8, StoredPool, raw_keys
from sglang_backend.linker_worker import Worker

log = logging.getLogger("gdsstore.sglang")

REMEMBERED = 4096  # requests
CLOSE_S = 1.0
# What a load of the page would meet as well. The rest says that it did not come in time, or found no room.
FAULTS = (
    PageStatus.MISS_CHECKSUM,
    PageStatus.MISS_IO,
    PageStatus.MISS_SEGMENT,
    PageStatus.MISS_RECLAIMED,
    PageStatus.MISS_VOLUME_SICK,
)

Note: TypeAlias = tuple[StoredPool, Sequence[str]]  # a pool, and SGLang's keys of its pages


class Prefetched:
    """What is brought for one request. `load_begins` is for the scheduler's thread, the rest for any."""

    def __init__(self, notes: Sequence[Note]) -> None:
        self._notes = tuple(notes)
        self._lock = threading.Lock()  # held while the store is asked
        self._over = False
        self._brought: list[tuple[StoredPool, U8, Prefetch]] = []

    def load_begins(self) -> None:
        """Do not begin any more. Does not wait."""
        self._over = True

    def begin(self, deadline_s: float, ended: Callable[[StoredPool, U8, Future[LoadResult]], None]) -> int:
        """Ask the store. Returns for how many pages. Raises GdsStoreError."""
        pages = 0
        for stored, names in self._notes:
            keys = raw_keys(names)
            with self._lock:
                if self._over:
                    break
                handle = stored.bound.prefetch(keys, deadline_s=deadline_s)
                self._brought.append((stored, keys, handle))
            handle.future.add_done_callback(
                lambda future, stored=stored, keys=keys: ended(stored, keys, future)  # type: ignore[misc]
            )
            pages += len(keys)
        return pages

    def settle(self) -> dict[str, U8]:
        """Bring no more. Returns for each pool, by name, the keys, (n, 32), of pages that are in the host cache. One that is not,
        or not any more, costs time and nothing else."""
        with self._lock:
            self._over = True
            brought = list(self._brought)
        return {stored.pool.name: _warm(keys, handle) for stored, keys, handle in brought}


def _warm(keys: U8, handle: Prefetch) -> U8:
    handle.cancel()
    result = _result(handle.future) if handle.done else None
    if result is not None:
        return keys[: len(result.status)][result.ok]
    return keys[: handle.progress.warm]  # the first ones come first


def _result(future: Future[LoadResult]) -> LoadResult | None:
    try:
        return future.result(0)
    except (CancelledError, GdsStoreError):
        return None


class Prefetches:
    """`deadline_s`: for how long a request is expected to wait at the most. Methods are for the scheduler's thread, and wait for
    nothing, except `close`."""

    def __init__(self, pools: Sequence[StoredPool], deadline_s: float) -> None:
        self._pools, self._deadline_s = tuple(pools), deadline_s
        self._waiting: OrderedDict[str, Prefetched] = OrderedDict()
        self._worker: Worker[Callable[[], object]] = Worker(
            "gdsstore-prefetch", _run, lambda _waiting: 1, None
        )
        self.requests = 0  # whose pages the store was asked for
        self.pages_asked = self.pages_brought = self.pages_failed = 0  # brought: in the cache when it ended

    def want(self, rid: str, transfers: Sequence[Any], pages: int) -> None:
        """A request that waits was told that `pages` can be loaded. Only the first time counts."""
        if pages == 0 or rid in self._waiting:
            return
        prefetched = Prefetched(self._notes(transfers, pages))
        self._waiting[rid] = prefetched
        if len(self._waiting) > REMEMBERED:  # nothing says when a request is gone
            self.give_up(self._waiting.popitem(last=False)[1])
        self._worker.put(lambda: self._begin(prefetched))

    def load_begins(self, rid: str) -> Prefetched | None:
        """What was brought for the request: its load takes over."""
        prefetched = self._waiting.pop(rid, None)
        if prefetched is not None:
            prefetched.load_begins()
        return prefetched

    def give_up(self, prefetched: Prefetched) -> None:
        """Nobody needs these any more."""
        prefetched.load_begins()
        self._worker.put(prefetched.settle)

    def reset(self) -> None:
        while self._waiting:
            self.give_up(self._waiting.popitem()[1])

    def close(self) -> None:
        """End the thread."""
        self.reset()
        self._worker.drain(CLOSE_S)
        self._worker.close()

    def _notes(self, transfers: Sequence[Any], pages: int) -> list[Note]:
        """The keys of a load of so many pages: of the trailing pools' only the last ones."""
        by_source = {str(transfer.name.value): transfer.keys or () for transfer in transfers}
        head = by_source[KV][:pages]
        return [
            (stored, head if stored.pool.source == KV else head[-len(by_source[stored.pool.source]) :])
            for stored in self._pools
            if by_source.get(stored.pool.source)
        ]

    # --- in the worker's thread ---

    def _begin(self, prefetched: Prefetched) -> None:
        pages = prefetched.begin(self._deadline_s, lambda *what: self._worker.put(lambda: self._ended(*what)))
        self.requests += pages > 0
        self.pages_asked += pages

    def _ended(self, stored: StoredPool, keys: U8, future: Future[LoadResult]) -> None:
        """A page that did not come is a miss before any request depends on it."""
        result = _result(future)
        if result is None:
            return
        keys = keys[: len(result.status)]
        self.pages_brought += int(np.count_nonzero(result.ok))
        lost = keys[np.isin(result.status, FAULTS)]
        if len(lost) == 0:
            return
        self.pages_failed += len(lost)
        stored.hold(lost)
        log.warning(
            "%d pages of pool %s could not be prefetched, and will be computed: %s",
            len(lost),
            stored.pool.name,
            result.reasons(),
        )


def _run(jobs: list[Callable[[], object]]) -> None:
    for job in jobs:
        try:
            job()
        except GdsStoreError as error:  # the request's load reads the pages itself
            log.warning("a prefetch was not made: %s", error)
        except Exception:
            log.exception("a prefetch failed")

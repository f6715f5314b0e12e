"""Calls of SGLang that move pages: started together, ended within the limit, and then done with the host pool's memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore import BoundNamespace, LoadResult, PageStatus, Pieces
from gdsstore.memory.views import describe
from gdsstore.transfer.results import CallResult
from gdsstore.waiting import Deadline
from sglang_backend.fence import replace_pages
from sglang_backend.pools import HostPool
from sglang_backend.stats import TransferStats

log = logging.getLogger("gdsstore.sglang")

POLL_S = 0.002
SAID_EVERY_S = 5.0
TRY_AGAIN = (PageStatus.FAILED_IO, PageStatus.FAILED_NO_SPACE)


@dataclass(frozen=True, slots=True)
class Order:
    """Pages of one pool to move. `pool`: None where the memory is not a host pool's but the call's own."""

    name: str
    bound: BoundNamespace
    keys: npt.NDArray[np.uint8]
    pages: Pieces
    pool: HostPool | None

    def take(self, index: npt.NDArray[np.intp]) -> Order:
        address = np.asarray(self.pages.address)[index]
        length = np.asarray(self.pages.length)
        length = length[index] if length.shape == np.asarray(self.pages.address).shape else length
        return Order(
            self.name, self.bound, self.keys[index], Pieces(address, length, self.pages.owner), self.pool
        )


class Traffic:
    """Thread-safe. `limit_s`: how long a call may take; `io_s`: how much of it the drive has."""

    def __init__(self, limit_s: float, io_s: float, stats: TransferStats | None) -> None:
        self._limit_s, self._io_s, self._stats = limit_s, io_s, stats
        self._idle = threading.Condition()
        self._under_way = 0
        self._left_lock = threading.Lock()
        self._left: list[CallResult] = []  # what the drive has not let go of

    @property
    def stuck(self) -> bool:
        """Whether the drive still holds memory of a call that has returned. Until it lets go, everything is a miss."""
        if not self._left:
            return False
        with self._left_lock:
            self._left = [result for result in self._left if result.memory_in_use]
            return bool(self._left)

    def load(self, orders: Sequence[Order]) -> dict[str, list[bool]]:
        """For each order, by name, and each page whether it was loaded."""
        return self._run(orders, self._load)

    def save(self, orders: Sequence[Order]) -> dict[str, list[bool]]:
        """For each order, by name, and each page whether it is stored. What failed for want of space or by an I/O error is tried
        once more, since SGLang does not."""
        return self._run(orders, self._save)

    def wait_until_idle(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._under_way == 0, 2 * self._limit_s)

    def _run(
        self, orders: Sequence[Order], move: Callable[[Sequence[Order], Deadline], dict[str, list[bool]]]
    ) -> dict[str, list[bool]]:
        with self._idle:
            self._under_way += 1
        try:
            return move(orders, Deadline(self._limit_s))
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    def _load(self, orders: Sequence[Order], limit: Deadline) -> dict[str, list[bool]]:
        start = time.monotonic()
        calls = [(order, _start(order.bound.load, order, self._io_s)) for order in orders]
        loaded = {}
        for order, future in calls:
            result = self._result(order, future, PageStatus.MISS_IO)
            self._let_go(order, result, limit, writes=True)
            loaded[order.name] = result.ok.tolist()
            if self._stats is not None:
                count = LoadResult(result.status).prefix
                nbytes = order.bound.namespace.layout.page_bytes
                self._stats.loaded(count, count * nbytes, time.monotonic() - start)
        return loaded

    def _save(self, orders: Sequence[Order], limit: Deadline) -> dict[str, list[bool]]:
        start = time.monotonic()
        calls = [(order, _start(order.bound.save, order, self._io_s)) for order in orders]
        saved = {}
        for order, future in calls:
            result = self._result(order, future, PageStatus.FAILED_IO)
            self._let_go(order, result, limit, writes=False)
            ok, written = result.ok, result.count(PageStatus.SAVED)
            again = np.flatnonzero(np.isin(result.status, TRY_AGAIN))
            left_s = self._io_s - (time.monotonic() - start)
            if len(again) and left_s > 0:
                log.warning(
                    "%d pages of pool %s are written again: %s", len(again), order.name, result.reasons()
                )
                part = order.take(again)
                second = self._result(part, _start(part.bound.save, part, left_s), PageStatus.FAILED_IO)
                self._let_go(part, second, limit, writes=False)
                ok[again] = second.ok
                written += second.count(PageStatus.SAVED)
            saved[order.name] = ok.tolist()
            if self._stats is not None:
                # Not those that were stored already: nothing was written for them.
                nbytes = order.bound.namespace.layout.page_bytes
                self._stats.saved(written, written * nbytes, time.monotonic() - start)
        return saved

    def _result(self, order: Order, future: Future[Any], failed: PageStatus) -> CallResult:
        """The store ends every call by its deadline, and starts nothing after it. Should it ever be later than the drive's share
        of the limit allows (a process without a free core), it is waited for: the memory comes first."""
        patience_s = self._limit_s
        while not wait([future], patience_s).done:
            patience_s = SAID_EVERY_S
            log.critical("a call on pool %s is late; its memory is not given back before it ends", order.name)
        error = future.exception()
        if error is None:
            result: CallResult = future.result()
            return result
        log.error("%d pages of pool %s were not moved", len(order.keys), order.name, exc_info=error)
        return CallResult(np.full(len(order.keys), failed, np.uint8))  # nothing is under way

    def _let_go(self, order: Order, result: CallResult, limit: Deadline, *, writes: bool) -> None:
        """Return when the drive can do no harm to the order's memory any more."""
        if not result.memory_in_use:
            return
        # The margin is for replacing pages, so that the limit holds.
        while result.memory_in_use and limit.left_s > 0.02 * self._limit_s:
            time.sleep(POLL_S)
        if not result.memory_in_use:
            return
        with self._left_lock:
            self._left.append(result)
        missed = np.flatnonzero(~result.ok)
        log.error(
            "the drive did not answer in %.1f s: %d pages of pool %s fail",
            self._limit_s,
            len(missed),
            order.name,
        )
        if not writes:  # the drive reads what it likes: its slots are not committed
            return
        if order.pool is None:  # the store keeps it alive for the drive, and it is nobody else's
            return
        missed = missed[order.bound.in_place(order.pages, len(order.keys))[missed]]
        page_bytes = order.bound.namespace.layout.page_bytes
        memory = describe(order.pages, len(order.keys), page_bytes, writable=True).take(missed)
        if len(missed) == 0 or (not order.pool.pinned and replace_pages(memory)):
            return
        said = 0.0
        while result.memory_in_use:
            if time.monotonic() - said > SAID_EVERY_S:
                said = time.monotonic()
                log.critical(
                    "the drive holds memory of pool %s that cannot be replaced; waiting for it (zero_copy = false avoids this)",
                    order.name,
                )
            time.sleep(POLL_S)


def _start(call: Callable[..., Future[Any]], order: Order, deadline_s: float) -> Future[Any]:
    """An error comes out of the future, so that the other orders of a call are still seen to their end."""
    try:
        return call(order.keys, order.pages, deadline_s=deadline_s)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

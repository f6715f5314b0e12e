"""Which queued request gets the next worker."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from gdsstore.transfer.policy_terms import Limits, Request, TransferClass

FROM_BELOW = tuple(reversed(TransferClass))
SLACK = 32  # entries of a heap that may be out of date before it is made anew


class ReadyQueues:
    """The requests that could start, by class.

    A class goes before the ones below it. Within prefetch, the higher priority goes first, then the earlier deadline, then the
    smaller one; in the other classes, the one that came first. So that nobody waits for ever, a class has a turn when `turn` starts
    of higher ones have passed it by, and in prefetch every `turn`-th start goes to the one that has waited longest.
    """

    def __init__(self, limits: Limits) -> None:
        self._ready: list[OrderedDict[Request, None]] = [OrderedDict() for _ in TransferClass]
        self._by_deadline: list[tuple[tuple[int, float], int, int, Request]] = []
        self._passed = [0] * len(TransferClass)  # starts of higher classes while this one waited
        self._prefetches = 0  # started
        self._running = [0] * len(TransferClass)
        self._turn = limits.turn
        self._lanes = [limits.lanes(cls) for cls in TransferClass]

    def __len__(self) -> int:
        return sum(len(ready) for ready in self._ready)

    @property
    def running(self) -> list[int]:
        """Requests that run, by the class that they were started in."""
        return list(self._running)

    def push(self, request: Request) -> None:
        self._ready[request.cls][request] = None
        if request.cls is TransferClass.PREFETCH:
            self._enter_by_deadline(request)

    def discard(self, request: Request) -> bool:
        """Take a request out, under the class that it has now. False where it is not in."""
        if request not in self._ready[request.cls]:
            return False
        del self._ready[request.cls][request]
        if not self._ready[request.cls]:
            self._passed[request.cls] = 0
        return True

    def hurry(self, request: Request) -> None:
        """The urgency of a request has changed."""
        if request.cls is TransferClass.PREFETCH and request in self._ready[request.cls]:
            self._enter_by_deadline(request)

    def pop(self) -> Request | None:
        """The request to start now, which then counts as running; None where no worker is free for any."""
        cls = self._choose()
        if cls is None:
            return None
        ready = self._ready[cls]
        if cls is TransferClass.PREFETCH:
            request = self._next_prefetch()
            del ready[request]
        else:
            request, _ = ready.popitem(last=False)
        self._passed[cls] = 0
        for lower in range(cls + 1, len(self._ready)):
            if self._ready[lower]:
                self._passed[lower] += 1
        self._running[cls] += 1
        request.lane = cls
        return request

    def release(self, lane: TransferClass) -> None:
        """A request that was started in this class has ended."""
        self._running[lane] -= 1

    def _choose(self) -> TransferClass | None:
        first: TransferClass | None = None
        due: TransferClass | None = None
        at_most = 0
        for cls in FROM_BELOW:  # from below, since a class's limit also holds for those below it
            at_most += self._running[cls]
            if at_most >= self._lanes[cls]:
                first = due = None  # nor may any of those below start
            elif self._ready[cls]:
                first = cls
                if self._passed[cls] >= self._turn and (
                    due is None or self._passed[cls] >= self._passed[due]
                ):
                    due = cls
        return first if due is None else due

    def _next_prefetch(self) -> Request:
        ready = self._ready[TransferClass.PREFETCH]
        self._prefetches += 1
        if self._prefetches % self._turn == 0:
            return next(iter(ready))
        while True:
            request = heapq.heappop(self._by_deadline)[-1]
            if request in ready:
                return request

    def _enter_by_deadline(self, request: Request) -> None:
        # Entries of those that are not ready any more are left in: taking them out costs more than passing over them.
        ready = self._ready[TransferClass.PREFETCH]
        if len(self._by_deadline) > 2 * len(ready) + SLACK:
            self._by_deadline = [_entry(each) for each in ready]
            heapq.heapify(self._by_deadline)
            return
        heapq.heappush(self._by_deadline, _entry(request))


def _entry(request: Request) -> tuple[tuple[int, float], int, int, Request]:
    return request.urgency, request.nbytes, request.number, request

"""An inference server of which only time is modelled: it computes one prompt after the other, in order of arrival.

Its loads and saves are real, or those of a test. A page is saved once the prompt that it belongs to is computed, and nothing is
kept on the "GPU": what is not in the store is computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gdsstore.replay.timed_plan import TimedRequest
from gdsstore.replay.truth import U8

LOAD_LIMIT_S = 600.0  # for one request's load; what the store itself does not end by then is an error of it


class Clock(Protocol):
    def now_s(self) -> float: ...

    def sleep_until(self, at_s: float) -> None: ...


class RealClock:
    """The monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - time.monotonic()))


class VirtualClock:
    """Time that passes at once, for what nothing real is waited for."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s)


class Loading(Protocol):
    """Pages on their way."""

    @property
    def ready(self) -> int:
        """Pages from the start that are there by now, and need not be loaded again."""
        ...

    @property
    def pages(self) -> int: ...

    @property
    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> None:
        """Wait until it is done, `timeout_s` at most."""
        ...

    def cancel(self) -> None: ...


class Prefetching(Protocol):
    """Pages on their way into memory."""

    @property
    def ready(self) -> int:
        """How many are there by now."""
        ...

    @property
    def pages(self) -> int: ...

    def cancel(self) -> None: ...


class StoreSide(Protocol):
    """What the server needs of a store."""

    def lookup(self, keys: U8) -> int:
        """Pages from the start that are there, and worth their load now."""
        ...

    def load(self, keys: U8) -> Loading:
        """For a request whose turn it is. Those that were prefetched come from memory."""
        ...

    def prefetch(self, keys: U8, input_tokens: int, wait_s: float) -> Prefetching | None:
        """Begin to bring what is there, and worth it, for a request of so many tokens whose turn comes in `wait_s` seconds."""
        ...

    def save(self, keys: U8) -> None: ...


@dataclass(slots=True)
class Served:
    """What became of the requests, in order."""

    ttft_s: list[float] = field(default_factory=list)  # from arrival to the end of prefill
    load_s: list[float] = field(default_factory=list)  # that the server waited for a load
    hit_tokens: int = 0
    tokens: int = 0
    compute_s: float = 0.0


@dataclass(slots=True)
class _Waiting:
    request: TimedRequest
    arrived_s: float
    prefetch: Prefetching | None
    compute_s: float  # as far as can be told


class TimedServer:
    """Serves requests with `store` (None: computes all). `gives_up`: a load that takes longer than its pages would take to compute
    is given up."""

    def __init__(
        self,
        store: StoreSide | None,
        clock: Clock,
        *,
        prefill_tokens_s: float,
        block_tokens: int,
        prefetch: bool = False,
        gives_up: bool = False,
    ) -> None:
        self._store, self._clock = store, clock
        self._rate, self._block_tokens = prefill_tokens_s, block_tokens
        self._prefetch, self._gives_up = prefetch, gives_up
        self._upcoming: deque[TimedRequest] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._start_s = self._free_s = 0.0
        self._fresh: U8 | None = None  # pages that the prompt under way makes
        self.served = Served()

    def run(
        self, requests: Sequence[TimedRequest], on_step: Callable[[int], None] = lambda done: None
    ) -> Served:
        """Serve them all, by the clock. `on_step` is called with how many are served."""
        self._upcoming.extend(requests)
        self._start_s = self._free_s = self._clock.now_s()
        while self._upcoming or self._waiting or self._fresh is not None:
            self._admit()
            if self._fresh is not None and self._clock.now_s() >= self._free_s:
                if self._store is not None and len(self._fresh):
                    self._store.save(self._fresh)
                self._fresh = None
            elif self._waiting and self._fresh is None:
                self._serve(self._waiting.popleft())
                on_step(len(self.served.ttft_s))
            else:
                self._clock.sleep_until(self._next_event_s(self._free_s if self._fresh is not None else None))
        return self.served

    def _admit(self) -> None:
        now_s = self._clock.now_s()
        while self._upcoming and self._start_s + self._upcoming[0].arrival_s <= now_s:
            request = self._upcoming.popleft()
            prefetch = self._begin_prefetch(request) if self._prefetch else None
            left = request.input_tokens - self._hit_tokens(request, prefetch.pages if prefetch else 0)
            arrived_s = self._start_s + request.arrival_s
            self._waiting.append(_Waiting(request, arrived_s, prefetch, left / self._rate))

    def _begin_prefetch(self, request: TimedRequest) -> Prefetching | None:
        assert self._store is not None
        wait_s = max(0.0, self._free_s - self._clock.now_s()) + sum(each.compute_s for each in self._waiting)
        return self._store.prefetch(request.keys, request.input_tokens, wait_s)

    def _serve(self, waiting: _Waiting) -> None:
        request, woken_s = waiting.request, self._clock.now_s()
        hit = self._fetch(request, waiting.prefetch)
        hit_tokens = self._hit_tokens(request, hit)
        compute_s = (request.input_tokens - hit_tokens) / self._rate
        load_s = self._clock.now_s() - woken_s
        # From when the server was free, not from when this process got to it: that is no time of a server's.
        self._free_s = max(self._free_s, waiting.arrived_s) + load_s + compute_s
        self._fresh = request.keys[hit:]
        served = self.served
        served.ttft_s.append(self._free_s - waiting.arrived_s)
        served.load_s.append(load_s)
        served.hit_tokens += hit_tokens
        served.tokens += request.input_tokens
        served.compute_s += compute_s

    def _fetch(self, request: TimedRequest, prefetch: Prefetching | None) -> int:
        """Pages from the start that are there when this returns: those that were prefetched, and what was saved since."""
        if self._store is None:
            return 0
        found = self._store.lookup(request.keys)
        warm = 0
        if prefetch is not None:
            warm = min(found, prefetch.ready)
            prefetch.cancel()  # what has not come by now is loaded, or computed
        return self._await(self._store.load(request.keys[:found]), request, found - warm) if found else 0

    def _await(self, loading: Loading, request: TimedRequest, cold: int) -> int:
        """Wait for a load of which `cold` pages come from the drive. How many are ready."""
        limit_s = LOAD_LIMIT_S
        if self._gives_up and cold:
            limit_s = min(cold * self._block_tokens, request.input_tokens) / self._rate
        until_s = self._clock.now_s() + limit_s
        while not loading.done and self._clock.now_s() < until_s:
            loading.wait(self._next_event_s(until_s) - self._clock.now_s())
            self._admit()
        ready = loading.ready
        loading.cancel()
        return ready

    def _hit_tokens(self, request: TimedRequest, pages: int) -> int:
        # The last token is always computed: the first output token comes from it.
        return min(pages * self._block_tokens, request.input_tokens - 1)

    def _next_event_s(self, at_s: float | None) -> float:
        """The next arrival, or `at_s` if that is sooner."""
        arrival_s = self._start_s + self._upcoming[0].arrival_s if self._upcoming else None
        return min(time_s for time_s in (arrival_s, at_s) if time_s is not None)

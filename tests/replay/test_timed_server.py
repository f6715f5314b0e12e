"""The modelled server, on a virtual clock and a store of which every load takes a known time: TTFT to the last digit."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.costing import leading
from gdsstore.replay.timed_plan import TimedRequest
from gdsstore.replay.timed_server import Served, TimedServer, VirtualClock
from gdsstore.replay.truth import U8
from gdsstore.transfer.cost import FIRST_BYTES, CostModel

RATE, BLOCK_TOKENS, PAGE_BYTES = 100.0, 100, 1 << 20  # a page computes in a second


class Loading:
    """Pages that come at known times."""

    def __init__(self, clock: VirtualClock, times: list[float]) -> None:
        self._clock, self._times = clock, times
        self.stopped = False

    @property
    def pages(self) -> int:
        return len(self._times)

    @property
    def ready(self) -> int:
        late = [at > self._clock.now_s() + 1e-9 for at in self._times]
        return late.index(True) if True in late else len(late)

    @property
    def done(self) -> bool:
        return self.stopped or self.ready == self.pages

    def wait(self, timeout_s: float) -> None:
        self._clock.sleep_until(min(self._clock.now_s() + timeout_s, max(self._times)))

    def cancel(self) -> None:
        self.stopped = True


class Prefetching:
    def __init__(self, store: Store, keys: list[bytes]) -> None:
        self._store, self._keys = store, keys

    @property
    def pages(self) -> int:
        return len(self._keys)

    @property
    def ready(self) -> int:
        return self._store.warm(self._keys)

    def cancel(self) -> None:
        self._store.line = [(key, since) for key, since in self._store.line if key not in self._keys]


class Store:
    """One drive, a page at a time, loads before prefetches. What was prefetched stays in memory until it is loaded, and with
    `keeps` for ever."""

    def __init__(self, clock: VirtualClock, page_s: float, cost: CostModel | None, keeps: bool) -> None:
        self._clock, self._page_s, self._cost, self._keeps = clock, page_s, cost, keeps
        self._there: set[bytes] = set()
        self.line: list[tuple[bytes, float]] = []  # prefetches that have not begun, and since when they wait
        self._come_s: dict[bytes, float] = {}  # when a prefetched page is in memory
        self._free_s = 0.0
        self.loaded = self.prefetched = 0

    def _advance(self) -> float:
        """The prefetches that have begun by now; the time."""
        now_s = self._clock.now_s()
        while self.line and max(self._free_s, self.line[0][1]) <= now_s:
            key, since_s = self.line.pop(0)
            self._come_s[key] = self._read(since_s)
        return now_s

    def _read(self, since_s: float) -> float:
        self._free_s = max(since_s, self._free_s) + self._page_s
        return self._free_s

    def _learn(self, pages: int) -> None:
        if self._cost is not None:
            self._cost.observe_load(pages * PAGE_BYTES, pages * self._page_s)

    def warm(self, keys: list[bytes]) -> int:
        now_s = self._advance()
        return leading(np.array([self._come_s.get(key, 1e9) <= now_s + 1e-9 for key in keys], np.bool_))

    def _found(self, keys: U8) -> int:
        return leading(np.array([key.tobytes() in self._there for key in keys], np.bool_))

    def _worth(self, pages: int, rest_tokens: int, warm: int, wait_s: float, queued_bytes: int) -> int:
        if self._cost is None or not pages:
            return pages
        advice = self._cost.advise(
            pages=pages,
            page_bytes=PAGE_BYTES,
            page_tokens=BLOCK_TOKENS,
            queued_bytes=queued_bytes,
            cached_tokens=warm * BLOCK_TOKENS,
            rest_tokens=rest_tokens,
            wait_s=wait_s,
        )
        return advice.load_pages

    @property
    def _under_way_bytes(self) -> int:
        return int(max(0.0, self._free_s - self._advance()) / self._page_s * PAGE_BYTES)

    def lookup(self, keys: U8) -> int:
        found = self._found(keys)
        warm = self.warm([bytes(key) for key in keys[:found]])
        rest_tokens = (len(keys) - found) * BLOCK_TOKENS
        return warm + self._worth(found - warm, rest_tokens, warm, 0.0, self._under_way_bytes)

    def load(self, keys: U8) -> Loading:
        now_s = self._advance()
        wanted = [bytes(key) for key in keys]
        fresh = [key for key in wanted if key not in self._come_s]
        self.loaded += len(fresh)
        self._learn(len(fresh))
        self._come_s |= {key: self._read(now_s) for key in fresh}
        times = [self._come_s[key] for key in wanted]
        if not self._keeps:
            self._come_s = {key: at for key, at in self._come_s.items() if key not in wanted}
        return Loading(self._clock, times)

    def prefetch(self, keys: U8, input_tokens: int, wait_s: float) -> Prefetching | None:
        now_s, found = self._advance(), self._found(keys)
        queued_bytes = self._under_way_bytes + len(self.line) * PAGE_BYTES
        worth = self._worth(found, max(0, input_tokens - found * BLOCK_TOKENS), 0, wait_s, queued_bytes)
        wanted = [bytes(key) for key in keys[:worth]]
        coming = {*self._come_s, *(key for key, _ in self.line)}
        fresh = [key for key in wanted if key not in coming]
        self.prefetched += len(fresh)
        self._learn(len(fresh))
        self.line += [(key, now_s) for key in fresh]
        return Prefetching(self, wanted) if wanted else None

    def save(self, keys: U8) -> None:
        self._there |= {key.tobytes() for key in keys}


def request(arrival_s: float, pages: int, chat: int = 0) -> TimedRequest:
    keys = [hashlib.sha256(f"{chat} {page}".encode()).digest() for page in range(pages)]
    return TimedRequest(
        arrival_s, pages * BLOCK_TOKENS, np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
    )


def served(
    requests: list[TimedRequest],
    page_s: float | None = None,
    *,
    prefetch: bool = False,
    cost: bool = False,
    keeps: bool = False,
) -> tuple[Served, Store | None]:
    clock = VirtualClock()
    model = CostModel(prefill_tokens_s=RATE) if cost else None
    store = None if page_s is None else Store(clock, page_s, model, keeps)
    server = TimedServer(
        store,
        clock,
        prefill_tokens_s=RATE,
        block_tokens=BLOCK_TOKENS,
        prefetch=prefetch,
        gives_up=cost,
    )
    return server.run(requests), store


CHAT = [request(0.0, 3), request(1.0, 4), request(10.0, 4), request(10.0, 5)]


def test_without_a_store_prompts_are_computed_one_after_the_other() -> None:
    found, _ = served(CHAT)
    assert found.ttft_s == pytest.approx([3.0, 6.0, 4.0, 9.0])
    assert found.hit_tokens == 0
    assert found.compute_s == pytest.approx(16.0)


def test_what_earlier_prompts_left_is_loaded_at_the_turn() -> None:
    found, store = served(CHAT, 0.25)
    # The third prompt is all there: its last token alone is computed.
    assert found.ttft_s == pytest.approx([3.0, 3.0 + 0.75 + 1.0 - 1.0, 1.0 + 0.01, 1.01 + 1.0 + 1.0])
    assert found.load_s == pytest.approx([0.0, 0.75, 1.0, 1.0])
    assert store is not None
    assert (store.loaded, store.prefetched) == (11, 0)


def test_a_prefetch_runs_while_the_request_waits() -> None:
    requests = [request(0.0, 4, chat) for chat in range(2)] + [request(10.0, 4, chat) for chat in range(2)]
    found, store = served(requests, 0.25, prefetch=True)
    # The last request's pages come behind the third's, from 11.0 on, while that one is computed.
    assert found.ttft_s == pytest.approx([4.0, 8.0, 1.01, 2.0 + 0.01])
    assert found.load_s == pytest.approx([0.0, 0.0, 1.0, 0.99])
    assert store is not None
    assert (store.loaded, store.prefetched) == (6, 8)  # each turn took over what had not begun


def test_what_is_in_memory_is_not_loaded_again() -> None:
    found, store = served(CHAT, 0.25, prefetch=True, keeps=True)
    assert found.ttft_s == pytest.approx([3.0, 3.75, 0.26, 0.26 + 1.0])
    assert store is not None
    assert (store.loaded, store.prefetched) == (3, 1)


def test_a_prefetch_begins_at_the_arrival_also_while_the_server_waits_for_a_load() -> None:
    requests = [request(0.0, 8), request(0.0, 8, 1), request(20.0, 8), request(21.0, 8, 1)]
    found, _ = served(requests, 0.5, prefetch=True)
    assert found.ttft_s == pytest.approx([8.0, 16.0, 4.01, 24.0 + 4.0 + 0.01 - 21.0])


def test_pages_are_there_only_when_their_prompt_is_computed() -> None:
    found, _ = served([request(0.0, 4), request(0.0, 4, chat=1), request(0.0, 4)], 0.25)
    assert found.ttft_s == pytest.approx([4.0, 8.0, 9.01])


def test_with_a_cost_model_a_slow_drive_costs_little() -> None:
    chat = [request(20.0 * turn, 3 + turn) for turn in range(12)]
    alone = served(chat)[0].ttft_s
    without = served(chat, 3.0, prefetch=True)[0].ttft_s
    with_model = served(chat, 3.0, prefetch=True, cost=True)[0].ttft_s
    assert np.mean(without) > 2 * np.mean(alone)
    assert np.mean(with_model[2:]) <= 1.01 * np.mean(alone[2:])


def test_with_a_cost_model_a_fast_drive_is_used() -> None:
    chat = [request(20.0 * turn, 3 + turn) for turn in range(12)]
    found, _ = served(chat, 0.01, prefetch=True, cost=True)
    plain, _ = served(chat, 0.01, prefetch=True)
    assert found.ttft_s[4:] == pytest.approx(plain.ttft_s[4:])


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.floats(0, 8), st.integers(0, 2), st.integers(1, 30)), min_size=10, max_size=40
    ),
    page_s=st.floats(0.01, 10),
)
def test_the_cost_model_is_never_slower_than_no_store(
    turns: list[tuple[float, int, int]], page_s: float
) -> None:
    arrivals = np.cumsum([pause for pause, _, _ in turns]).tolist()
    requests = [request(at, pages, chat) for at, (_, chat, pages) in zip(arrivals, turns, strict=True)]
    alone = served(requests)[0].ttft_s
    found = served(requests, page_s, prefetch=True, cost=True)[0].ttft_s
    # The first loads teach how slow the drive is; they are small, and given up when their pages could have been computed.
    lessons_s = 2 * FIRST_BYTES / PAGE_BYTES * BLOCK_TOKENS / RATE
    assert np.mean(found) <= 1.01 * np.mean(alone) + lessons_s
    assert max(found) <= 1.01 * max(alone) + lessons_s

"""The modelled server, on a virtual clock and a store of which every load takes a known time: TTFT to the last digit."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.replay.timed_plan import TimedRequest
from gdsstore.replay.timed_server import Served, TimedServer, VirtualClock
from gdsstore.replay.truth import U8
from gdsstore.transfer.cost import FIRST_BYTES, CostModel

RATE, BLOCK_TOKENS, PAGE_BYTES = 100.0, 100, 1 << 20  # a page computes in a second


class Loading:
    def __init__(self, clock: VirtualClock, begin_s: float, pages: int, page_s: float) -> None:
        self._clock, self._begin_s, self._page_s = clock, begin_s, page_s
        self.pages = pages
        self.end_s = begin_s + pages * page_s
        self.stopped = False

    @property
    def ready(self) -> int:
        come = (self._clock.now_s() - self._begin_s) / self._page_s + 1e-9
        return max(0, min(self.pages, int(come)))

    @property
    def done(self) -> bool:
        return self.stopped or self.ready == self.pages

    def wait(self, timeout_s: float) -> None:
        self._clock.sleep_until(min(self._clock.now_s() + timeout_s, self.end_s))

    def cancel(self) -> None:
        self.stopped = True


class Store:
    """One drive, first come first served; a page takes `page_s`."""

    def __init__(self, clock: VirtualClock, page_s: float, cost: CostModel | None = None) -> None:
        self._clock, self._page_s, self._cost = clock, page_s, cost
        self._there: set[bytes] = set()
        self._free_s = 0.0
        self.loaded = self.prefetched = 0

    def lookup(self, keys: U8) -> int:
        there = [key.tobytes() in self._there for key in keys]
        return there.index(False) if False in there else len(there)

    def load(self, keys: U8) -> Loading:
        self.loaded += len(keys)
        return self._begin(keys)

    def prefetch(self, keys: U8) -> Loading:
        self.prefetched += len(keys)
        return self._begin(keys)

    def _begin(self, keys: U8) -> Loading:
        loading = Loading(self._clock, max(self._clock.now_s(), self._free_s), len(keys), self._page_s)
        self._free_s = loading.end_s
        if self._cost is not None:
            self._cost.observe_load(len(keys) * PAGE_BYTES, len(keys) * self._page_s)
        return loading

    def save(self, keys: U8) -> None:
        self._there |= {key.tobytes() for key in keys}

    @property
    def queued_bytes(self) -> int:
        return int(max(0.0, self._free_s - self._clock.now_s()) / self._page_s * PAGE_BYTES)


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
) -> tuple[Served, Store | None]:
    clock = VirtualClock()
    model = CostModel(prefill_tokens_s=RATE) if cost else None
    store = None if page_s is None else Store(clock, page_s, model)
    server = TimedServer(
        store,
        clock,
        prefill_tokens_s=RATE,
        block_tokens=BLOCK_TOKENS,
        page_bytes=PAGE_BYTES,
        prefetch=prefetch,
        cost=model,
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
    found, store = served(CHAT, 0.25, prefetch=True)
    # The last request's pages come behind the third's, from 11.0 to 12.0; its turn is at 11.01.
    assert found.ttft_s == pytest.approx([3.0, 3.75, 1.01, 2.0 + 1.0])
    assert found.load_s == pytest.approx([0.0, 0.75, 1.0, 0.99])
    assert store is not None
    assert (store.loaded, store.prefetched) == (3, 8)


def test_a_prefetch_begins_at_the_arrival_also_while_the_server_waits_for_a_load() -> None:
    requests = [request(0.0, 8), request(20.0, 8), request(21.0, 8)]
    found, _ = served(requests, 0.5, prefetch=True)
    assert found.ttft_s == pytest.approx([8.0, 4.01, 24.0 + 4.0 + 0.01 - 21.0])


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

"""The cost model in worlds whose speeds are known: it loads where that is faster, and never pays for a load that is not."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.sizes import KiB, MiB
from gdsstore.transfer.cost import FIRST_BYTES, GROWTH, Advice, CostModel

PAGE_BYTES, PAGE_TOKENS = 256 * KiB, 64


class World:
    """A drive and a GPU with noise: every load and every prefill takes what they make of it."""

    def __init__(self, bandwidth: float, fixed_s: float, tokens_s: float, noise: float, seed: int) -> None:
        self.bandwidth, self.fixed_s, self.tokens_s, self.noise = bandwidth, fixed_s, tokens_s, noise
        self.dice = np.random.default_rng(seed)
        self.model = CostModel()
        self.model.observe_prefill(10_000, 10_000 / tokens_s)

    def load_s(self, pages: int) -> float:
        exact = self.fixed_s + pages * PAGE_BYTES / self.bandwidth
        return exact * float(np.exp(self.dice.normal(0, self.noise)))

    def serve(self, pages: int, rest_tokens: int) -> tuple[Advice, float, float]:
        """What was advised, the time it took, and the time of computing all."""
        advice = self.model.advise(
            pages=pages, page_bytes=PAGE_BYTES, page_tokens=PAGE_TOKENS, rest_tokens=rest_tokens
        )
        load_s = self.load_s(advice.load_pages) if advice.load_pages else 0.0
        if advice.load_pages:
            self.model.observe_load(advice.load_pages * PAGE_BYTES, load_s)
        tokens = pages * PAGE_TOKENS + rest_tokens
        compute_s = (tokens - advice.load_pages * PAGE_TOKENS) / self.tokens_s
        self.model.observe_prefill(tokens - advice.load_pages * PAGE_TOKENS, compute_s)
        return advice, load_s + compute_s, tokens / self.tokens_s


WORLDS = st.builds(
    World,
    bandwidth=st.floats(1e7, 1e10),
    fixed_s=st.floats(0, 0.01),
    tokens_s=st.floats(1e3, 1e5),
    noise=st.floats(0, 0.4),
    seed=st.integers(0, 1 << 30),
)


@settings(max_examples=60, deadline=None)
@given(WORLDS)
def test_no_request_is_slower_than_computing_within_the_error(world: World) -> None:
    """After what it takes to learn, the loads cost no more than the time they save and the errors' own size."""
    spent_s = alone_s = 0.0
    probe_s = world.fixed_s + FIRST_BYTES / world.bandwidth
    for turn in range(120):
        _, took_s, compute_s = world.serve(int(world.dice.integers(1, 400)), 64)
        if turn >= 20:
            spent_s, alone_s = spent_s + took_s, alone_s + compute_s
    assert spent_s <= 1.03 * alone_s + 2 * probe_s * np.exp(2 * world.noise)


@settings(max_examples=60, deadline=None)
@given(WORLDS, st.floats(3, 100))
def test_what_loads_much_faster_than_it_computes_is_loaded(world: World, times: float) -> None:
    world.fixed_s = 0.0
    world.bandwidth = times * np.exp(3 * world.noise) * world.tokens_s / PAGE_TOKENS * PAGE_BYTES
    for _ in range(40):
        world.serve(int(world.dice.integers(100, 400)), 64)
    asked = 200
    advice, _, _ = world.serve(asked, 64)
    assert advice.load_pages == asked
    assert advice.reason == "loading is faster"


@settings(max_examples=60, deadline=None)
@given(WORLDS, st.floats(2, 100))
def test_what_computes_much_faster_than_it_loads_is_computed(world: World, times: float) -> None:
    world.bandwidth = world.tokens_s / PAGE_TOKENS * PAGE_BYTES / times / np.exp(3 * world.noise)
    advised = [world.serve(200, 64)[0].load_pages for _ in range(60)]
    assert advised[0] * PAGE_BYTES == FIRST_BYTES  # nothing was known
    assert max(advised) * PAGE_BYTES <= FIRST_BYTES  # the others are probes
    assert advised.count(0) >= 30


def test_a_drive_of_which_nothing_is_known_is_tried_with_little_and_then_more() -> None:
    world = World(1e9, 0.001, 1e3, 0.0, 0)
    sizes = [world.serve(1000, 0)[0].load_pages * PAGE_BYTES for _ in range(5)]
    assert sizes[0] == FIRST_BYTES
    assert sizes[1] == GROWTH * FIRST_BYTES
    assert sizes[-1] == 1000 * PAGE_BYTES


def test_small_loads_do_not_speak_for_large_ones() -> None:
    """They tell what a load costs. Nobody would load anything any more, after one page that took a millisecond."""
    model = CostModel(prefill_tokens_s=1e4)
    for _ in range(10):
        model.observe_load(4 * KiB, 0.001)
    hit = {"pages": 400, "page_bytes": PAGE_BYTES, "page_tokens": PAGE_TOKENS}
    advice = model.advise(**hit)
    assert (advice.load_pages * PAGE_BYTES, advice.reason) == (FIRST_BYTES, "learning how fast the drive is")
    model.observe_load(FIRST_BYTES, 1.0)  # and large ones speak: this drive is that slow
    model.observe_load(FIRST_BYTES, 1.0)
    assert model.advise(**hit).load_pages == 0


def test_a_drive_that_recovers_is_found_out() -> None:
    world = World(1e6, 0.0, 1e4, 0.0, 0)
    for _ in range(50):
        world.serve(400, 64)
    world.bandwidth = 1e10
    advised = [world.serve(400, 64)[0].load_pages for _ in range(300)]
    assert advised[-1] == 400


def test_a_drive_that_becomes_slow_is_found_out_at_once() -> None:
    world = World(1e10, 0.0, 1e4, 0.0, 0)
    for _ in range(40):
        assert world.serve(400, 64)[0].load_pages > 0
    world.bandwidth = 1e6
    advised = [world.serve(400, 64)[0].load_pages for _ in range(10)]
    assert advised[2:] == [0] * 8


def measured(bandwidth: float, tokens_s: float, fixed_s: float = 0.0) -> CostModel:
    model = CostModel(prefill_tokens_s=tokens_s)
    for i in range(16):
        nbytes = (1 + i) * 16 * MiB
        model.observe_load(nbytes, fixed_s + nbytes / bandwidth)
    return model


def test_a_load_that_queues_too_long_is_computed() -> None:
    model = measured(bandwidth=1e9, tokens_s=1e4)  # 200 pages: 52 ms to load, 1.28 s to compute
    hit = {"pages": 200, "page_bytes": PAGE_BYTES, "page_tokens": PAGE_TOKENS}
    assert model.advise(**hit).load_pages == 200
    behind = model.advise(**hit, queued_bytes=3 * 10**9)
    assert (behind.load_pages, behind.reason) == (0, "computing is faster")
    # What happens while the request waits for its turn costs nothing.
    assert model.advise(**hit, queued_bytes=3 * 10**9, wait_s=4.0).load_pages == 200


def test_as_many_pages_are_loaded_as_come_while_the_request_waits() -> None:
    model = measured(bandwidth=1e8, tokens_s=1e5)  # a page: 2.6 ms to load, 0.64 ms to compute
    advice = model.advise(pages=400, page_bytes=PAGE_BYTES, page_tokens=PAGE_TOKENS, wait_s=0.5)
    assert advice.load_pages == pytest.approx(0.5 / (PAGE_BYTES / 1e8), abs=2)
    assert advice.reason == "computing the rest is faster"


def test_overlapped_load_and_compute_are_balanced() -> None:
    model = measured(
        bandwidth=1e8, tokens_s=PAGE_TOKENS * 1e8 / PAGE_BYTES
    )  # a page loads as fast as it computes
    hit = {"pages": 100, "page_bytes": PAGE_BYTES, "page_tokens": PAGE_TOKENS}
    assert model.advise(**hit, overlapped=True).load_pages == pytest.approx(50, abs=1)
    assert model.advise(**hit, rest_tokens=100 * PAGE_TOKENS, overlapped=True).load_pages == 100


def test_attention_makes_pages_behind_a_long_context_worth_their_load() -> None:
    model = CostModel(prefill_tokens_s=1e5, attention_s=1e-9)
    for i in range(16):
        nbytes = (1 + i) * 16 * MiB
        model.observe_load(nbytes, nbytes / 2e8)
    hit = {"pages": 100, "page_bytes": PAGE_BYTES, "page_tokens": PAGE_TOKENS}
    assert model.advise(**hit).load_pages == 0
    assert model.advise(**hit, cached_tokens=100_000).load_pages == 100


def test_a_learned_prefill_rate_leaves_attention_out() -> None:
    model = CostModel(attention_s=1e-8)
    for first in (0, 10_000, 50_000):
        seconds = 1e-4 * 1000 + 1e-8 * 1000 * (first + 500)
        model.observe_prefill(1000, seconds, cached_tokens=first)
    advice = model.advise(pages=10, page_bytes=MiB, page_tokens=100)
    assert advice.compute_alone_s == pytest.approx(1e-4 * 1000 + 1e-8 * 1000 * 500)


def test_without_a_prefill_rate_every_hit_is_loaded() -> None:
    advice = CostModel().advise(pages=7, page_bytes=MiB, page_tokens=64)
    assert (advice.load_pages, advice.reason) == (7, "the prefill rate is not known")


def test_a_request_without_a_hit_is_computed() -> None:
    model = measured(bandwidth=1e9, tokens_s=1e4)
    advice = model.advise(pages=0, page_bytes=MiB, page_tokens=64, rest_tokens=100)
    assert (advice.load_pages, advice.expected_load_s) == (0, 0.0)
    assert advice.expected_compute_s == advice.compute_alone_s == pytest.approx(0.01)


def test_fixed_costs_and_bytes_are_told_apart() -> None:
    model = measured(bandwidth=1e9, tokens_s=1e4, fixed_s=0.02)
    advice = model.advise(pages=640, page_bytes=PAGE_BYTES, page_tokens=PAGE_TOKENS)
    assert advice.expected_load_s == pytest.approx(0.02 + 640 * PAGE_BYTES / 1e9, rel=1e-6)


def test_threads_may_observe_and_ask_at_the_same_time() -> None:
    model = CostModel(prefill_tokens_s=1e4)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(200):
                model.observe_load((1 + (seed + i) % 50) * MiB, 0.01)
                model.advise(pages=20, page_bytes=MiB, page_tokens=64)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


@pytest.mark.parametrize(
    "wrong", [{"prefill_tokens_s": 0.0}, {"prefill_tokens_s": float("nan")}, {"attention_s": -1.0}]
)
def test_rates_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        CostModel(**wrong)


def test_a_hit_of_pages_without_tokens_is_refused() -> None:
    with pytest.raises(ArgumentError):
        CostModel().advise(pages=1, page_bytes=MiB, page_tokens=0)

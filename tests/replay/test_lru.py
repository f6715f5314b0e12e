from pathlib import Path

import pytest

from gdsstore.errors import ArgumentError
from gdsstore.replay.lru import PageLru
from gdsstore.replay.requests import portion
from gdsstore.replay.traces import open_trace
from gdsstore.replay.workload import MultiTurn


def test_a_hit_counts_only_within_the_unbroken_prefix() -> None:
    lru = PageLru(10)
    assert lru.request([1, 2, 3]) == 0
    assert lru.request([1, 2, 3, 4]) == 3
    assert lru.request([1, 9, 3]) == 1
    assert lru.request([8, 1, 2]) == 0


def test_the_least_recently_used_page_goes_and_a_prefix_outlives_its_leaf() -> None:
    lru = PageLru(4)
    lru.request([1, 2, 3])
    lru.request([7, 8])
    assert len(lru) == 4
    assert lru.request([1, 2, 3]) == 2  # 3 went first, as the leaf of the older request


def test_of_a_request_larger_than_the_capacity_the_first_pages_stay() -> None:
    lru = PageLru(3)
    lru.request(range(10))
    assert len(lru) == 3
    assert lru.request(range(10)) == 3


def test_without_pressure_only_what_was_never_seen_misses() -> None:
    lru = PageLru(10**9)
    seen: set[int] = set()
    for request in portion(MultiTurn(seed=3), requests=200):
        blocks = request.blocks.tolist()
        assert lru.request(blocks) == sum(block in seen for block in blocks)
        seen.update(blocks)


def test_a_capacity_of_no_page_is_refused() -> None:
    with pytest.raises(ArgumentError):
        PageLru(0)


@pytest.mark.parametrize(("capacity_pages", "hits"), [(500, 399), (4000, 579), (10**9, 1528)])
def test_a_recorded_trace_hits_what_an_independent_simulation_hit(capacity_pages: int, hits: int) -> None:
    """The whole traces give 11.2/21.2/28.8/35.5 % and 27.9/42.4/57.2/64.0 % at 5,000 to 50,000 pages."""
    lru = PageLru(capacity_pages)
    trace = open_trace(Path(__file__).parent / "data" / "conversation_400.jsonl.gz")
    requests = [request.blocks.tolist() for request in trace]
    assert sum(map(len, requests)) == 11349
    assert sum(lru.request(blocks) for blocks in requests) == hits

"""A replay with time on a real store: the bytes are real and right, and every variant serves the same requests."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.errors import ArgumentError, DeadlineError, GdsStoreError
from gdsstore.prefetch import Progress
from gdsstore.replay import timed_store
from gdsstore.replay.plan import ReplayPlan
from gdsstore.replay.requests import portion
from gdsstore.replay.timed import replay_timed
from gdsstore.replay.timed_plan import DEFAULT_LOAD, TimedPlan, Variant
from gdsstore.replay.timed_store import TimedStore, save_now
from gdsstore.replay.traces import open_trace
from gdsstore.replay.truth import U8, fill_pages
from gdsstore.sizes import KiB, MiB
from gdsstore.transfer.cost import Advice
from gdsstore.transfer.results import CallResult, PageStatus

TRACE = Path(__file__).parent / "data" / "conversation_400.jsonl.gz"
PAGE_BYTES = 16 * KiB
WAIT_S = 60.0


def plan(
    tmp_path: Path, *, seconds: float = 0.3, timing: dict[str, Any] | None = None, **asked: Any
) -> TimedPlan:
    settings = {
        "segment_bytes": MiB,
        "staging_bytes": 16 * MiB,
        "chunk_bytes": 4 * MiB,
        "engine": "posix",
        "host_cache": 32 * MiB,
    }
    fields = {
        "stores": (str(tmp_path / "store"),),
        "page_bytes": PAGE_BYTES,
        "trace": str(TRACE),
        "capacity": 64 * MiB,
        "requests": 30,
        "settings": settings,
    }
    return TimedPlan(replay=ReplayPlan(**{**fields, **asked}), seconds=seconds, **(timing or {}))


# --- the plan ---


def test_requests_fit_into_the_time_and_leave_the_server_some(tmp_path: Path) -> None:
    schedule = plan(tmp_path, seconds=6.0).schedule()
    arrivals = [request.arrival_s for request in schedule.requests]
    assert arrivals[0] == 0.0
    assert arrivals[-1] == pytest.approx(6.0)
    assert arrivals == sorted(arrivals)
    tokens = sum(request.input_tokens for request in schedule.requests)
    assert tokens / schedule.prefill_tokens_s == pytest.approx(DEFAULT_LOAD * 6.0)
    assert len(schedule.requests) == 30


def test_a_given_scale_keeps_the_pauses_and_ends_with_the_time(tmp_path: Path) -> None:
    asked = plan(tmp_path, seconds=5.0, requests=None, timing={"scale": 2.0, "prefill_tokens_s": 1e4})
    schedule = asked.schedule()
    recorded = [request.arrival_s for request in open_trace(TRACE) if request.arrival_s <= 10.0]
    assert [request.arrival_s * 2.0 for request in schedule.requests] == pytest.approx(recorded)
    assert schedule.prefill_tokens_s == 1e4


def test_what_skipped_requests_had_too_is_there_from_the_start(tmp_path: Path) -> None:
    schedule = plan(tmp_path, skip=300).schedule()
    trace = list(open_trace(TRACE))
    seen = {block for request in trace[:300] for block in request.blocks.tolist()}
    wanted = {block for request in trace[300:330] for block in request.blocks.tolist()}
    assert len(schedule.there) == len(seen & wanted) > 1  # in this trace a block has one prefix
    assert schedule.unique_pages == len(wanted)
    assert len(plan(tmp_path).schedule().there) == 0


@pytest.mark.parametrize(
    ("timing", "asked"),
    [
        ({"scale": 0.0}, {}),
        ({"prefill_tokens_s": -1.0}, {}),
        ({"throttle_bytes_s": float("nan")}, {}),
        ({}, {"processes": 2}),
        ({}, {"faults": "errno:0.1"}),
    ],
)
def test_numbers_that_make_no_replay_are_refused(
    tmp_path: Path, timing: dict[str, Any], asked: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError):
        plan(tmp_path, timing=timing, **asked)


def test_a_trace_that_ends_before_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="skip"):
        plan(tmp_path, skip=5000).schedule()


# --- all of it ---


@pytest.mark.parametrize("throttle", [None, 100e6])
def test_every_variant_serves_the_same_requests_with_no_wrong_byte(
    tmp_path: Path, throttle: float | None
) -> None:
    told: list[tuple[Variant, int]] = []
    asked = plan(tmp_path, skip=300, timing={"throttle_bytes_s": throttle})
    report = replay_timed(asked, lambda variant, done: told.append((variant, done)))
    assert [each.variant for each in report.variants] == list(Variant)
    assert told == [(variant, done + 1) for variant in Variant for done in range(30)]
    assert report.wrong_pages == 0
    none, store, prefetch, cost = report.variants
    assert (none.hit_rate, none.pages_loaded, none.pages_saved) == (0.0, 0, 0)
    for each in (store, prefetch, cost):
        assert len(each.ttft_s) == 30
        assert min(each.ttft_s) > 0
        assert each.misses == {}
        assert each.pages_saved > 0
    for each in (store, prefetch):  # what was stored before can be hit whatever else is saved in time
        assert each.pages_loaded >= len(asked.schedule().there)
        assert 0 < each.hit_rate < 1
        assert each.compute_s < none.compute_s
    assert report.engine == ("posix" if throttle is None else "throttled-posix")
    assert report.to_table().row_count == 4
    assert json.loads(json.dumps(report.to_dict()))["variants"][1]["variant"] == "store"


def test_wrong_bytes_from_a_store_that_does_not_verify_are_counted() -> None:
    store = DictNamespace()
    keys = page_keys(8)
    store.fill(keys)
    store.pages[keys[5].tobytes()][77] ^= 1
    side = timed(store)
    loading = side.load(keys)
    loading.wait(WAIT_S)
    side.close()
    assert loading.ready == 8
    assert side.tally.wrong_pages == 1


# --- the store's side ---


class Handle:
    """A prefetch under way."""

    def __init__(self, pages: int) -> None:
        self.progress = Progress(0, pages)
        self.done = False

    def cancel(self) -> bool:
        self.done = True
        return False


class DictNamespace:
    """A namespace in a dict. `held`: calls do not end until a test ends them."""

    def __init__(self) -> None:
        self.pages: dict[bytes, np.ndarray] = {}
        self.loads: list[list[bytes]] = []
        self.missing: set[bytes] = set()
        self.error: GdsStoreError | None = None
        self.held: list[Future[CallResult]] | None = None
        self.worth = 1000  # pages that are advised, at most
        self.asked: list[tuple[int, int, float, int]] = []
        self.prefetches: list[Handle] = []

    def fill(self, keys: U8) -> None:
        pages = np.zeros((len(keys), PAGE_BYTES), np.uint8)
        fill_pages(keys, pages)
        self.pages |= {key.tobytes(): page for key, page in zip(keys, pages, strict=True)}

    def lookup(self, keys: U8) -> int:
        return sum(key.tobytes() in self.pages for key in keys)

    def contains(self, keys: U8) -> np.ndarray:
        return np.array([key.tobytes() in self.pages for key in keys], np.bool_)

    def advise(self, pages: int, *, rest_tokens: int, wait_s: float, queued_bytes: int) -> Advice:
        self.asked.append((pages, rest_tokens, wait_s, queued_bytes))
        return Advice(min(pages, self.worth), 0.0, 0.0, 0.0, "")

    def prefetch(self, keys: U8, *, deadline_s: float) -> Handle:
        self.prefetches.append(Handle(len(keys)))
        return self.prefetches[-1]

    def load(self, keys: U8, pages: U8, *, deadline_s: float) -> Future[CallResult]:
        self.loads.append([key.tobytes() for key in keys])
        status = np.full(len(keys), PageStatus.LOADED, np.uint8)
        for row, key in enumerate(map(bytes, keys)):
            if key in self.missing:
                status[row] = PageStatus.MISS_IO
            else:
                pages[row] = self.pages[key]
        future: Future[CallResult] = Future()
        if self.error is not None:
            future.set_exception(self.error)
        elif self.held is not None:
            self.held.append(future)
            future.status = status
        else:
            future.set_result(CallResult(status))
        return future

    def save(self, keys: U8, pages: U8, *, deadline_s: float) -> Future[CallResult]:
        self.pages |= {key.tobytes(): page.copy() for key, page in zip(keys, pages, strict=True)}
        future: Future[CallResult] = Future()
        future.set_result(CallResult(np.full(len(keys), PageStatus.SAVED, np.uint8)))
        return future


def page_keys(n: int) -> U8:
    return np.random.default_rng(n).integers(0, 256, (n, 32), dtype=np.uint8)


def timed(store: DictNamespace, rows: int = 2) -> TimedStore:
    return TimedStore(store, lambda: np.zeros((rows, PAGE_BYTES), np.uint8), WAIT_S, block_tokens=10)


def test_a_load_goes_in_chunks_and_ends_at_the_first_page_that_misses() -> None:
    store = DictNamespace()
    keys = page_keys(9)
    store.fill(keys)
    store.missing = {keys[5].tobytes()}
    side = timed(store)
    loading = side.load(keys)
    loading.wait(WAIT_S)
    side.close()
    assert (loading.ready, loading.pages) == (5, 9)
    assert [len(chunk) for chunk in store.loads] == [2, 2, 2]
    assert side.tally.pages_loaded == 5
    assert side.tally.misses == {"MISS_IO": 1}


def test_a_cancelled_load_starts_nothing_more() -> None:
    store = DictNamespace()
    keys = page_keys(8)
    store.fill(keys)
    store.held = []
    side = timed(store)
    loading = side.load(keys)
    _until(lambda: len(store.held or ()) == 1)
    loading.cancel()
    assert loading.done
    store.held[0].set_result(CallResult(store.held[0].status))
    side.close()
    assert len(store.loads) == 1


def test_what_is_there_and_worth_it_is_prefetched_behind_what_was_asked_for_before() -> None:
    store = DictNamespace()
    keys = page_keys(9)
    store.fill(keys[:6])
    store.worth = 4
    side = timed(store)
    assert side.prefetch(keys[7:], 20, 0.0) is None
    assert store.asked == []
    first = side.prefetch(keys, 95, 2.5)
    assert first is not None
    assert (first.pages, first.ready) == (4, 0)
    store.prefetches[0].progress = Progress(3, 4)
    assert first.ready == 3
    side.prefetch(keys, 95, 2.5)
    first.cancel()
    assert store.prefetches[0].done
    side.prefetch(keys, 95, 2.5)
    side.close()
    # 95 tokens less six pages of ten; one page of the first was still to come, then four of the second.
    assert store.asked == [(6, 35, 2.5, queued * PAGE_BYTES) for queued in (0, 1, 4)]


def test_an_error_of_the_store_reaches_the_server_and_nobody_waits() -> None:
    store = DictNamespace()
    keys = page_keys(2)
    store.fill(keys)
    store.error = DeadlineError("the drive is gone")
    side = timed(store)
    loading = side.load(keys)
    loading.wait(WAIT_S)
    assert loading.done
    assert loading.ready == 0
    _until(lambda: side._failure is not None)
    with pytest.raises(DeadlineError, match="gone"):
        side.lookup(keys)
    with pytest.raises(DeadlineError, match="gone"):
        side.close()


def test_a_save_that_waited_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictNamespace()
    side = timed(store)
    side.save(page_keys(3))
    _until(lambda: len(store.pages) == 3)
    monkeypatch.setattr(timed_store, "SAVE_BUDGET_S", 0.0)
    side.save(page_keys(5))
    _until(lambda: side.tally.saves_dropped == 5)
    side.close()
    assert side.tally.pages_saved == 3


def test_pages_that_are_there_from_the_start_are_saved_in_parts_that_fit_the_memory() -> None:
    store = DictNamespace()
    keys = page_keys(7)
    save_now(store, keys, np.zeros((3, PAGE_BYTES), np.uint8))
    side = timed(store)
    loading = side.load(keys)
    loading.wait(WAIT_S)
    side.close()
    assert (loading.ready, side.tally.wrong_pages) == (7, 0)


def _until(true: Any) -> None:
    deadline = timed_store.Deadline(WAIT_S)
    while not true():
        assert not deadline.passed
        timed_store.time.sleep(0.001)


def test_the_trace_of_these_tests_has_hits() -> None:
    blocks = [request.blocks for request in portion(open_trace(TRACE), 300, 30)]
    assert sum(map(len, blocks)) > len(np.unique(np.concatenate(blocks)))

from concurrent.futures import Future

import numpy as np
import pytest

from gdsstore.errors import DeadlineError
from gdsstore.replay.lru import PageLru
from gdsstore.replay.replayer import Replayer
from gdsstore.replay.requests import Request
from gdsstore.replay.workload import MultiTurn
from gdsstore.transfer.results import CallResult, PageStatus

PAGE_BYTES = 4096


class HeldResult(CallResult):
    """A result after a deadline: the drive still writes to the memory."""

    @property
    def memory_in_use(self) -> bool:
        return True


class DictStore:
    """A namespace in a dict, that does wrong what a test asks it to."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.flip_key: bytes | None = None  # its page is loaded with a flipped bit
        self.miss_key: bytes | None = None  # its page is found and then not loaded
        self.lazy = False  # loads claim success and do nothing
        self.held = False
        self.buffers: set[int] = set()

    def lookup(self, keys: np.ndarray) -> int:
        there = [key.tobytes() in self.pages for key in keys]
        return there.index(False) if False in there else len(there)

    def load(self, keys: np.ndarray, pages: np.ndarray) -> Future[CallResult]:
        self.calls.append(("load", len(keys)))
        status = np.full(len(keys), PageStatus.LOADED, np.uint8)
        for i, key in enumerate(map(bytes, keys)):
            if key == self.miss_key:
                status[i] = PageStatus.MISS_CHECKSUM
                pages[i] = 0
            elif not self.lazy:
                pages[i] = np.frombuffer(self.pages[key], np.uint8)
                pages[i, 77] ^= key == self.flip_key
        return self._ended(status, pages)

    def save(self, keys: np.ndarray, pages: np.ndarray) -> Future[CallResult]:
        self.calls.append(("save", len(keys)))
        self.pages |= {key.tobytes(): page.tobytes() for key, page in zip(keys, pages, strict=True)}
        return self._ended(np.full(len(keys), PageStatus.SAVED, np.uint8), pages)

    def _ended(self, status: np.ndarray, pages: np.ndarray) -> Future[CallResult]:
        self.buffers.add(pages.ctypes.data)
        future: Future[CallResult] = Future()
        future.set_result((HeldResult if self.held else CallResult)(status))
        return future


def replayer(store: DictStore, rows: int = 64, deadline_s: float = 5.0) -> Replayer:
    return Replayer(store, lambda: np.zeros((rows, PAGE_BYTES), np.uint8), deadline_s)


def request(*blocks: int) -> Request:
    return Request(0.0, 512 * len(blocks), 1, np.array(blocks, np.int64), 0)


def replayed(store: DictStore, *requests: Request, rows: int = 64) -> Replayer:
    one = replayer(store, rows)
    one.run(requests, lambda: None)
    return one


def test_a_boundless_store_hits_what_a_boundless_lru_hits() -> None:
    requests = list(MultiTurn(sessions=40))
    lru = PageLru(10**9)
    hits = sum(lru.request(request.blocks.tolist()) for request in requests)
    tally = replayed(DictStore(), *requests).tally
    assert tally.pages_hit == tally.pages_loaded == tally.pages_verified == hits
    assert tally.pages == sum(len(request.blocks) for request in requests)
    assert tally.saves["SAVED"] == tally.misses["not found"] == tally.pages - hits
    assert tally.requests == len(tally.lookup_s) == len(requests)
    assert tally.wrong_pages == 0


def test_a_flipped_bit_is_a_wrong_page_and_ends_the_hit() -> None:
    store = DictStore()
    replayed(store, request(1, 2, 3, 4))
    store.flip_key = list(store.pages)[1]
    tally = replayed(store, request(1, 2, 3, 4)).tally
    assert (tally.wrong_pages, tally.pages_loaded, tally.pages_verified, tally.pages_hit) == (1, 4, 3, 1)
    assert tally.wrong_keys == [store.flip_key.hex()]


def test_a_page_that_misses_at_load_is_no_wrong_page_but_ends_the_hit_and_is_saved_again() -> None:
    store = DictStore()
    replayed(store, request(1, 2, 3, 4))
    store.miss_key = list(store.pages)[2]
    tally = replayed(store, request(1, 2, 3, 4)).tally
    assert (tally.wrong_pages, tally.pages_loaded, tally.pages_hit) == (0, 3, 2)
    assert tally.misses["MISS_CHECKSUM"] == 1
    assert "LOADED" not in tally.misses
    assert store.calls[-1] == ("save", 2)


def test_what_an_earlier_call_left_in_the_buffer_does_not_pass_for_a_loaded_page() -> None:
    store = DictStore()
    one = replayed(store, request(1, 2, 3))
    store.lazy = True
    one.run([request(1, 2, 3)], lambda: None)
    assert one.tally.wrong_pages == 3


def test_a_request_larger_than_the_buffer_goes_in_several_calls() -> None:
    store = DictStore()
    tally = replayed(store, request(*range(10)), request(*range(12)), rows=4).tally
    assert store.calls == [
        ("save", 4),
        ("save", 4),
        ("save", 2),
        ("load", 4),
        ("load", 4),
        ("load", 2),
        ("save", 2),
    ]
    assert (tally.pages_hit, tally.wrong_pages) == (10, 0)
    assert len(tally.load_s) == 1


def test_a_request_without_blocks_asks_nothing_of_the_store() -> None:
    store = DictStore()
    assert replayed(store, request()).tally.requests == 1
    assert store.calls == []


def test_memory_that_the_drive_may_still_write_to_is_not_used_again() -> None:
    store = DictStore()
    store.held = True
    tally = replayed(store, request(1), request(1), request(1)).tally
    assert len(store.buffers) == 3
    assert (tally.pages_hit, tally.wrong_pages) == (2, 0)


def test_a_store_that_never_answers_is_an_error_by_the_deadline() -> None:
    class Silent(DictStore):
        def save(self, keys: np.ndarray, pages: np.ndarray) -> Future[CallResult]:
            return Future()

    with pytest.raises(DeadlineError, match="save"):
        replayer(Silent(), deadline_s=0.01).run([request(1)], lambda: None)


def test_progress_is_told_at_each_call() -> None:
    steps = []
    one = replayer(DictStore())
    one.run([request(1), request(1)], lambda: steps.append(one.tally.requests))
    assert steps == [0, 1, 1, 2]

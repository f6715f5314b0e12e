"""Pages from a shared host cache whose owner may be wrong, slow, hostile or gone: right bytes, or those of the drive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import (
    ConfigError,
    MissingExtraError,
    PageLayout,
    PageStatus,
    Pieces,
    Store,
    remote_borrowed,
    remote_pages,
)
from gdsstore.node_link import SOCKET_NAME, NodeLink
from tests.store.helpers import (
    WAIT_S,
    check,
    flip,
    load,
    locate,
    make_keys,
    opaque,
    save,
    segments,
    small_store,
    truth,
)
from tests.store.shared_tiers import ForgedTier, link

KEYS = make_keys(60)


@pytest.fixture
def tier() -> ForgedTier:
    return ForgedTier(8192)


@pytest.fixture
def store(tmp_path: Path, tier: ForgedTier) -> Iterator[Store]:
    with small_store(tmp_path / "s", chunk_bytes="64KiB") as opened:
        link(opened, tier)
        yield opened
    assert tier.leases == 0
    assert tier.closed


def count(store: Store, name: str) -> int:
    return int(store.stats().get(name, 0))


def test_pages_in_the_shared_cache_are_loaded_without_the_drive(store: Store, tier: ForgedTier) -> None:
    assert save(opaque(store), KEYS).all_ok
    tier.put(KEYS, truth(KEYS, 8192))
    assert check(opaque(store), KEYS).all_ok
    assert count(store, "drive_bytes_read") == 0
    assert count(store, "pages_loaded") == count(store, "pages_loaded_from_shared") == 60


def test_what_is_not_there_comes_from_the_drive(store: Store, tier: ForgedTier) -> None:
    assert save(opaque(store), KEYS).all_ok
    tier.put(KEYS[10:30], truth(KEYS[10:30], 8192))
    assert check(opaque(store), make_keys(70)).loaded == 60
    assert count(store, "drive_bytes_read") == 40 * 8192
    assert tier.asked == 60, "of what the catalog does not have, nothing is to be borrowed"


def test_wrong_bytes_are_refused_and_read_from_the_drive(store: Store, tier: ForgedTier) -> None:
    assert save(opaque(store), KEYS).all_ok
    pages = truth(KEYS, 8192)
    pages[7, 8191] ^= 1
    pages[20] = 0
    pages[30], pages[31] = pages[31].copy(), pages[30].copy()
    tier.put(KEYS, pages)
    assert check(opaque(store), KEYS).all_ok
    assert count(store, "shared_pages_refused") == 4
    assert count(store, "drive_bytes_read") == 4 * 8192


def test_wrong_bytes_are_refused_even_where_the_drive_is_trusted(tmp_path: Path, tier: ForgedTier) -> None:
    with small_store(tmp_path / "s", verify=False) as store:
        link(store, tier)
        assert save(opaque(store), KEYS).all_ok
        tier.put(KEYS, np.zeros((60, 8192), np.uint8))
        assert check(opaque(store), KEYS).all_ok
        assert count(store, "shared_pages_refused") == 60


@pytest.mark.parametrize("page_bytes", [8192, 5000, 65536])
def test_bytes_that_change_while_they_are_copied_are_never_served(tmp_path: Path, page_bytes: int) -> None:
    tier = ForgedTier(-(-page_bytes // 4096) * 4096)
    with small_store(tmp_path / "s") as store:
        link(store, tier)
        pages = opaque(store, page_bytes)
        assert save(pages, KEYS, page_bytes).all_ok
        tier.put(KEYS, truth(KEYS, page_bytes))
        stop = threading.Event()

        def scribble() -> None:
            at, rng = tier.arena.array, np.random.default_rng(1)
            while not stop.is_set():
                for place in rng.integers(0, 60 * tier.record_bytes, 8).tolist():
                    old = at[place]
                    at[place] ^= 0xFF
                    time.sleep(0.0001)
                    at[place] = old

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for _ in range(40):
                assert check(pages, KEYS, page_bytes).all_ok
        finally:
            stop.set()
            thread.join()
        assert count(store, "pages_loaded_from_shared") > 0


def test_a_page_that_was_saved_anew_is_not_served_as_it_was(store: Store, tier: ForgedTier) -> None:
    pages, before = opaque(store), truth(make_keys(60, "other bytes"), 8192)
    assert pages.save(KEYS, before).result(WAIT_S).all_ok
    tier.put(KEYS, before)
    assert pages.delete(KEYS).all()
    assert load(pages, KEYS)[0].count(PageStatus.MISS_ABSENT) == 60
    assert save(pages, KEYS).all_ok
    assert check(pages, KEYS).all_ok


@pytest.mark.parametrize("claims", [0, 4096, 1 << 40])
def test_a_daemon_with_records_of_another_size_is_not_read_from(
    store: Store, tier: ForgedTier, claims: int
) -> None:
    assert save(opaque(store), KEYS).all_ok
    tier.put(KEYS, truth(KEYS, 8192))
    tier.claims = claims
    assert check(opaque(store), KEYS).all_ok
    assert tier.asked == 60
    assert count(store, "pages_loaded_from_shared") == 0


def test_cleared_pages_are_not_served(store: Store, tier: ForgedTier) -> None:
    pages = opaque(store)
    assert save(pages, KEYS).all_ok
    tier.put(KEYS, truth(KEYS, 8192))
    pages.clear()
    assert load(pages, KEYS)[0].count(PageStatus.MISS_ABSENT) == 60


def test_a_record_of_another_namespace_is_refused(store: Store, tier: ForgedTier) -> None:
    one, two = opaque(store), store.namespace(model="two", layout=PageLayout.opaque(8192))
    assert save(one, KEYS).all_ok
    other = truth(make_keys(60, "two"), 8192)
    assert two.save(KEYS, other).result(WAIT_S).all_ok
    tier.put(KEYS, other)
    assert check(one, KEYS).all_ok
    assert count(store, "shared_pages_refused") == 60


def test_pages_that_are_damaged_on_the_drive_are_still_served(
    tmp_path: Path, store: Store, tier: ForgedTier
) -> None:
    pages = opaque(store)
    assert save(pages, KEYS).all_ok
    segment, offset = locate(pages, KEYS[:1])
    store.close()
    flip(segments(tmp_path / "s")[int(segment[0])], (int(offset[0]) + 5) * 8)
    with small_store(tmp_path / "s") as again:
        link(again, tier)
        tier.put(KEYS[:1], truth(KEYS[:1], 8192))
        assert check(opaque(again), KEYS).all_ok


@pytest.mark.parametrize("page_bytes", [8192, 5000])
def test_scattered_memory_of_any_alignment_is_filled_and_nothing_beside_it(
    tmp_path: Path, page_bytes: int
) -> None:
    tier = ForgedTier(8192)
    with small_store(tmp_path / "s") as store:
        link(store, tier)
        pages, want = opaque(store, page_bytes), truth(KEYS, page_bytes)
        assert save(pages, KEYS, page_bytes).all_ok
        tier.put(KEYS, want)
        memory = np.full(60 * (page_bytes + 30) + 30, 0xEE, np.uint8)
        starts = memory.ctypes.data + 13 + np.arange(60)[:, None] * (page_bytes + 30)
        cut = np.array([0, 1001 + 10])  # between the pieces, a gap of 10 bytes
        lengths = [1001, page_bytes - 1001]
        result = pages.load(KEYS, Pieces(starts + cut, lengths, memory)).result(WAIT_S)
        assert result.all_ok
        expected = np.full_like(memory, 0xEE)
        for i in range(60):
            at = 13 + i * (page_bytes + 30)
            expected[at : at + 1001] = want[i, :1001]
            expected[at + 1011 : at + 10 + page_bytes] = want[i, 1001:]
        assert (memory == expected).all()
        assert count(store, "pages_loaded_from_shared") == 60


def test_a_daemon_that_does_not_answer_changes_nothing(store: Store, tier: ForgedTier) -> None:
    assert save(opaque(store), KEYS).all_ok
    tier.put(KEYS, truth(KEYS, 8192))
    tier.there = False
    assert check(opaque(store), KEYS).all_ok
    tier.there = True
    assert check(opaque(store), KEYS).all_ok
    assert count(store, "pages_loaded_from_shared") == 60


def test_without_time_nothing_is_copied_and_nothing_kept(store: Store, tier: ForgedTier) -> None:
    pages = opaque(store)
    assert save(pages, KEYS).all_ok
    tier.put(KEYS, truth(KEYS, 8192))
    lease = tier.lease

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return lease(*given)

    tier.lease = slow  # type: ignore[method-assign]
    result, memory = load(pages, KEYS, deadline_s=0.2)
    assert result.count(PageStatus.MISS_DEADLINE) == 60
    assert (memory == 0xEE).all()
    assert tier.leases == 0


def test_loads_of_nothing_and_lookups_ask_nobody(store: Store, tier: ForgedTier) -> None:
    pages = opaque(store)
    assert save(pages, KEYS).all_ok
    assert pages.lookup(KEYS) == 60
    assert pages.load(KEYS[:0], np.zeros((0, 8192), np.uint8)).result(WAIT_S).all_ok
    assert load(pages, make_keys(5, "unknown"))[0].count(PageStatus.MISS_ABSENT) == 5
    assert tier.asked == 0


def test_a_prefetch_asks_the_daemon_and_goes_on_without_it(store: Store, tier: ForgedTier) -> None:
    pages = opaque(store)
    handle = pages.prefetch(KEYS, deadline_s=5.0)
    assert handle.wait(WAIT_S)
    assert (handle.progress.warm, handle.progress.wanted) == (0, 60)
    digest, keys, deadline_s = tier.prefetched[0]
    assert (digest, keys) == (pages.digest, KEYS.tobytes())
    assert 0 < deadline_s <= 5.0
    tier.there = False
    assert pages.prefetch(KEYS).wait(WAIT_S)
    assert count(store, "shared_prefetch_asked") == count(store, "shared_prefetch_refused") == 60


@pytest.mark.parametrize("settings", [{"daemon": "off"}, {"host_cache": "8MiB"}])
def test_who_has_a_cache_or_wants_no_daemon_asks_none(
    tmp_path: Path, tier: ForgedTier, settings: dict[str, Any]
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / SOCKET_NAME).touch()
    with small_store(tmp_path / "s", **settings) as store:
        if "host_cache" in settings:
            link(store, tier)
        assert save(opaque(store), KEYS).all_ok
        assert check(opaque(store), KEYS).all_ok
        assert tier.asked == 0
        if "daemon" in settings:
            assert store.node is None
            with pytest.raises(ConfigError, match="set host_cache"):
                opaque(store).prefetch(KEYS)


def test_a_daemon_is_looked_for_once_a_second_at_most(tmp_path: Path, tier: ForgedTier) -> None:
    made: list[Path] = []

    def make(directory: Path) -> ForgedTier:
        made.append(directory)
        return tier

    link = NodeLink(tmp_path, make)
    assert link.tier is None
    (tmp_path / SOCKET_NAME).touch()
    assert link.tier is None
    assert not link.seen
    link._next_look = 0.0
    end = time.monotonic() + WAIT_S
    while link.tier is None and time.monotonic() < end:
        time.sleep(0.001)
    assert link.tier is tier
    assert made == [tmp_path]
    link.close()
    link.close()
    assert tier.closed
    assert link.tier is None


def test_missing_packages_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SOCKET_NAME).touch()

    def make(directory: Path) -> ForgedTier:
        raise MissingExtraError("msgspec", "service", "the node daemon's client")

    link = NodeLink(tmp_path, make)
    with caplog.at_level(logging.WARNING, "gdsstore"):
        end = time.monotonic() + WAIT_S
        while "pip install" not in caplog.text and time.monotonic() < end:
            assert link.tier is None
            time.sleep(0.001)
        link._next_look = 0.0
        assert link.tier is None
    assert caplog.text.count("pip install") == 1


def test_a_client_that_is_ready_after_the_store_was_closed_is_let_go(
    tmp_path: Path, tier: ForgedTier
) -> None:
    (tmp_path / SOCKET_NAME).touch()
    go = threading.Event()

    def make(directory: Path) -> ForgedTier:
        go.wait(WAIT_S)
        return tier

    link = NodeLink(tmp_path, make)
    link.look()
    link.close()
    go.set()
    end = time.monotonic() + WAIT_S
    while not tier.closed and time.monotonic() < end:
        time.sleep(0.001)
    assert tier.closed


# --- large calls ---


@pytest.fixture
def batches(tier: ForgedTier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each request for a lease has; of a daemon that is asked for 16 at a time."""
    asked: list[int] = []
    lease = tier.lease

    def counted(namespace: bytes, keys: Any, deadline: Any) -> Any:
        asked.append(len(keys))
        return lease(namespace, keys, deadline)

    monkeypatch.setattr(remote_borrowed, "BATCH_KEYS", 16)
    monkeypatch.setattr(remote_pages, "BATCH_KEYS", 16)
    monkeypatch.setattr(tier, "lease", counted)
    return asked


def test_the_daemon_is_asked_for_a_batch_after_the_other(
    store: Store, tier: ForgedTier, batches: list[int]
) -> None:
    assert save(opaque(store), KEYS).all_ok
    tier.put(KEYS[10:], truth(KEYS[10:], 8192))
    assert check(opaque(store), KEYS).all_ok
    assert batches == [16, 16, 16, 12]
    assert count(store, "pages_loaded_from_shared") == 50


@pytest.mark.parametrize("stops", ["answer", "memory", "time"])
def test_what_a_daemon_answered_before_it_was_of_no_more_use_is_used(
    store: Store, tier: ForgedTier, batches: list[int], monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    assert save(opaque(store), KEYS).all_ok
    tier.put(KEYS, truth(KEYS, 8192))
    lease = tier.lease

    def limited(namespace: bytes, keys: Any, deadline: Any) -> Any:
        if len(batches) == 2 and stops != "time":
            tier.there, tier.claims = stops != "answer", 4096 if stops == "memory" else None
        found = lease(namespace, keys, deadline)
        while len(batches) == 2 and stops == "time" and not deadline.passed:
            time.sleep(0.01)
        return found

    monkeypatch.setattr(tier, "lease", limited)
    assert check(opaque(store), KEYS).all_ok
    assert count(store, "pages_loaded_from_shared") == 32
    assert len(batches) == (2 if stops == "time" else 3)


def test_a_request_that_fails_leaves_no_record_leased(
    store: Store, tier: ForgedTier, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = tier.lease

    def broken(*given: Any) -> Any:
        if len(batches) == 2:
            raise MemoryError
        return lease(*given)

    monkeypatch.setattr(tier, "lease", broken)
    assert save(opaque(store), KEYS).all_ok
    tier.put(KEYS, truth(KEYS, 8192))
    with pytest.raises(MemoryError):
        load(opaque(store), KEYS)
    assert tier.leases == 0


@pytest.mark.parametrize("taken", [0, 2, 4])
def test_prefetches_are_asked_for_in_batches_too(
    store: Store, tier: ForgedTier, batches: list[int], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    prefetch = tier.prefetch

    def limited(*given: Any) -> bool:
        tier.there = len(tier.prefetched) < taken
        return prefetch(*given)

    monkeypatch.setattr(tier, "prefetch", limited)
    assert opaque(store).prefetch(KEYS).wait(WAIT_S)
    asked = [len(keys) // 32 for _, keys, _ in tier.prefetched]
    assert asked == [16, 16, 16, 12][: taken + 1]
    assert b"".join(keys for _, keys, _ in tier.prefetched) == KEYS.tobytes()[: 32 * sum(asked)]
    assert count(store, "shared_prefetch_asked") == sum([16, 16, 16, 12][:taken])
    assert count(store, "shared_prefetch_refused") == 60 - sum([16, 16, 16, 12][:taken])

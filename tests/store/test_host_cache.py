"""The host cache in front of the drives, through the public API."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import ConfigError, PageStatus, Pieces, Store
from gdsstore.engines.faults import parse_faults
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.engines.throttle import ThrottledEngine
from gdsstore.memory.copying import copy_ranges
from tests.store.helpers import WAIT_S, check, load, make_keys, opaque, save, small_store, truth

KEYS = make_keys(60)


def warm_store(path: Path, **settings: Any) -> Store:
    return small_store(path, **{"host_cache": "8MiB", **settings})


def read_bytes(store: Store) -> int:
    return int(store.stats().get("drive_bytes_read", 0))


def test_pages_that_were_saved_are_loaded_without_the_drive(tmp_path: Path) -> None:
    with warm_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
        check(opaque(store), KEYS)
        assert read_bytes(store) == 0
        assert store.stats()["pages_loaded"] == 60
    with small_store(tmp_path / "s") as store:
        check(opaque(store), KEYS)


def test_pages_that_were_loaded_stay_warm(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    with warm_store(tmp_path / "s") as store:
        check(opaque(store), KEYS)
        first = read_bytes(store)
        check(opaque(store), KEYS)
        assert read_bytes(store) == first > 0


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_unwritten_pages_are_found_and_loaded(tmp_path: Path, policy: str) -> None:
    with warm_store(tmp_path / "s", write_policy=policy) as store:
        pages = opaque(store)
        assert save(pages, KEYS).count(PageStatus.SAVED) == 60
        assert pages.lookup(KEYS) == 60
        assert pages.contains(KEYS).all()
        assert store.stats().get("drive_bytes_written", 0) == 0
        check(pages, KEYS)
        assert save(pages, KEYS).all_ok


def test_dirty_pages_are_written_at_close(tmp_path: Path) -> None:
    with warm_store(tmp_path / "s", write_policy="write_back") as store:
        assert save(opaque(store), KEYS).all_ok
    with small_store(tmp_path / "s") as store:
        assert opaque(store).lookup(KEYS) == 60
        check(opaque(store), KEYS)


def test_dirty_pages_are_written_by_sync(tmp_path: Path) -> None:
    with warm_store(tmp_path / "s", write_policy="write_back") as store:
        assert save(opaque(store), KEYS).all_ok
        store.sync()
        assert store.stats()["host_cache"]["dirty_records"] == 0
        assert store.stats()["drive_bytes_written"] >= 60 * 8192


def test_dirty_pages_make_room_by_going_to_the_drive(tmp_path: Path) -> None:
    keys = make_keys(3000)  # 24 MiB
    with warm_store(tmp_path / "s", write_policy="write_back") as store:
        for part in np.array_split(keys, 10):
            assert save(opaque(store), part).all_ok
        assert opaque(store).lookup(keys) == 3000
        check(opaque(store), keys)
        assert store.stats()["host_cache"]["dirty_lost"] == 0


def test_a_page_on_trial_goes_to_the_drive_when_it_is_used_again(tmp_path: Path) -> None:
    with warm_store(tmp_path / "s", write_policy="write_through_selective") as store:
        assert save(opaque(store), KEYS).all_ok
        check(opaque(store), KEYS[:20])
        end = time.monotonic() + WAIT_S
        while store.stats().get("pages_saved", 0) < 20 and time.monotonic() < end:
            time.sleep(0.01)
    with small_store(tmp_path / "s") as store:
        there = opaque(store).contains(KEYS)
        assert there[:20].all()
        assert not there[20:].any(), "pages that were used once are not worth a write"


def test_saves_that_do_not_take_part_leave_the_cache_alone(tmp_path: Path) -> None:
    with warm_store(tmp_path / "s", write_policy="never") as store:
        assert save(opaque(store), KEYS).all_ok
        assert store.stats()["host_cache"]["resident_records"] == 0


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_deleted_pages_are_gone_from_both(tmp_path: Path, policy: str) -> None:
    with warm_store(tmp_path / "s", write_policy=policy) as store:
        pages = opaque(store)
        assert save(pages, KEYS).all_ok
        assert pages.delete(KEYS[:10]).all()
        assert pages.lookup(KEYS[10:]) == 50
        assert load(pages, KEYS[:10])[0].count(PageStatus.MISS_ABSENT) == 10
        pages.clear()
        assert load(pages, KEYS)[0].count(PageStatus.MISS_ABSENT) == 60


def test_a_prefetch_makes_pages_warm(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    with warm_store(tmp_path / "s") as store:
        pages = opaque(store)
        handle = pages.prefetch(make_keys(70))  # ten of them are not there
        assert handle.wait(WAIT_S)
        assert (handle.progress.warm, handle.progress.wanted) == (60, 70)
        before = read_bytes(store)
        check(pages, KEYS)
        assert read_bytes(store) == before
        again = pages.prefetch(KEYS)
        assert again.wait(WAIT_S)
        assert again.progress.warm == 60
        assert read_bytes(store) == before


def test_without_a_host_cache_there_is_nothing_to_prefetch_into(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store, pytest.raises(ConfigError, match="set host_cache"):
        opaque(store).prefetch(KEYS)


def test_a_load_waits_for_what_a_prefetch_brings_and_reads_nothing_twice(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    engine = ThrottledEngine(PosixEngine(2), 1e6)  # half a second for all pages
    with warm_store(tmp_path / "s", own_engine=engine, chunk_bytes="64KiB") as store:
        pages = opaque(store)
        handle = pages.prefetch(KEYS[:40])
        end = time.monotonic() + WAIT_S
        while not handle.future.running() and time.monotonic() < end:
            time.sleep(0.001)
        check(pages, KEYS)
        assert handle.wait(WAIT_S)
        assert read_bytes(store) == 60 * 8192


def test_what_a_cancelled_prefetch_has_brought_is_usable(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    engine = ThrottledEngine(PosixEngine(2), 1e6)
    with warm_store(tmp_path / "s", own_engine=engine, chunk_bytes="64KiB") as store:
        pages = opaque(store)
        handle = pages.prefetch(KEYS)
        end = time.monotonic() + WAIT_S
        while handle.progress.warm == 0 and time.monotonic() < end:
            time.sleep(0.001)
        handle.cancel()
        assert handle.wait(WAIT_S)
        check(pages, KEYS)


def test_prefetches_that_nobody_uses_get_smaller(tmp_path: Path) -> None:
    keys = make_keys(4000)
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), keys).all_ok
    with warm_store(tmp_path / "s") as store:
        pages = opaque(store)
        for part in np.array_split(keys, 8):  # each pushes an earlier one out, unused
            assert pages.prefetch(part).wait(WAIT_S)
        handle = pages.prefetch(KEYS)
        assert handle.wait(WAIT_S)
        assert handle.progress.warm < 60
        assert store.stats()["host_cache"]["unused_prefetch"] > 0


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_under_faults_the_cache_holds_nothing_wrong(tmp_path: Path, policy: str) -> None:
    faults = parse_faults("errno:0.02,short:0.02,corrupt:0.03,misdirect:0.03")
    engine = FaultyEngine(PosixEngine(2), faults, seed=5)
    with warm_store(tmp_path / "s", own_engine=engine, write_policy=policy, chunk_bytes="64KiB") as store:
        pages = opaque(store)
        for number in range(20):
            keys = make_keys(100, number % 7)
            want = truth(keys, 8192)
            pages.save(keys, want).result(WAIT_S)
            if number % 3 == 0:
                pages.prefetch(keys).wait(WAIT_S)
            result, got = load(pages, keys)
            assert (got[result.ok] == want[result.ok]).all()


def test_a_damaged_page_on_the_drive_never_gets_warm(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    file = next((tmp_path / "s" / "segments").glob("*.seg"))
    raw = bytearray(file.read_bytes())
    raw[raw.index(truth(KEYS, 8192)[7].tobytes()) + 99] ^= 2
    file.write_bytes(raw)
    with warm_store(tmp_path / "s") as store:
        pages = opaque(store)
        handle = pages.prefetch(KEYS)
        assert handle.wait(WAIT_S)
        assert handle.progress.warm == 59
        result, _ = load(pages, KEYS)
        assert np.flatnonzero(~result.ok).tolist() == [7]


def test_what_a_caller_did_to_its_memory_does_not_enter_the_cache(tmp_path: Path) -> None:
    """Pages that are loaded into the same memory in part: one of them is not what its key says, for that caller alone."""
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    with warm_store(tmp_path / "s", chunk_bytes="64KiB") as store:
        pages = opaque(store)
        memory = np.zeros((31, 8192), np.uint8)
        over = np.concatenate([np.arange(30), np.arange(30) + 0.5]) * 8192 + memory.ctypes.data
        pages.load(KEYS, Pieces(over.astype(np.uint64), 8192, memory)).result(WAIT_S)
        check(pages, KEYS)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_is_copied_after_the_deadline_does_not_enter_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    with warm_store(tmp_path / "s", write_policy=policy) as store:
        pages, memory = opaque(store), truth(KEYS, 8192)

        def late(*ranges: Any) -> None:
            time.sleep(1.5)
            memory[:] = 0xAB  # the caller's again
            copy_ranges(*ranges)

        with monkeypatch.context() as patch:
            patch.setattr("gdsstore.tiers.cached.copy_ranges", late)
            pages.save(KEYS, memory, deadline_s=1.0).result(WAIT_S)
        result, got = load(pages, KEYS)
        assert (got[result.ok] == truth(KEYS, 8192)[result.ok]).all()

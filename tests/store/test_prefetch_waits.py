"""Loads and the prefetches that bring the same pages: neither reads what the other does, and no load waits in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from gdsstore.engines.base import Op
from gdsstore.engines.faults import Fault, FaultKind
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.engines.throttle import ThrottledEngine
from gdsstore.prefetch import Prefetch, Prefetches
from tests.store.helpers import U8, WAIT_S, check, make_keys, opaque, save, small_store, truth

KEYS = make_keys(60)
LONG_S = 40.0  # what waits that long has waited in vain


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), make_keys(600)).all_ok
    return tmp_path / "s"


def hang_once() -> FaultyEngine:
    return FaultyEngine(PosixEngine(2), [Fault(FaultKind.HANG, op=Op.READ, limit=1)], seed=0)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def test_a_load_does_not_wait_for_a_prefetch_that_has_not_begun(path: Path) -> None:
    engine = hang_once()
    with small_store(path, own_engine=engine, host_cache="8MiB", workers=2) as store:
        pages = opaque(store)
        stuck = pages.prefetch(KEYS[:10], deadline_s=LONG_S)  # has the one worker that prefetches may have
        until(lambda: engine.injected["hang"] == 1)
        waiting = pages.prefetch(KEYS[10:], deadline_s=LONG_S)
        assert check(pages, KEYS[20:30], deadline_s=LONG_S / 2).all_ok
        assert not waiting.done
        assert not stuck.done
        engine.release_hangs()
        assert waiting.wait(WAIT_S)


def test_a_load_does_not_wait_to_its_end_for_a_prefetch_that_hangs(path: Path) -> None:
    engine = hang_once()
    with small_store(path, own_engine=engine, host_cache="8MiB") as store:
        pages = opaque(store)
        stuck = pages.prefetch(KEYS, deadline_s=LONG_S)
        until(lambda: engine.injected["hang"] == 1)
        assert check(pages, KEYS[:20], deadline_s=6.0).all_ok  # half of it for the prefetch
        engine.release_hangs()
        assert stuck.wait(WAIT_S)


def test_a_load_takes_the_first_pages_of_a_long_prefetch_as_they_come(path: Path) -> None:
    engine = ThrottledEngine(PosixEngine(2), 2.5e5)
    with small_store(path, own_engine=engine, host_cache="8MiB", chunk_bytes="64KiB") as store:
        pages = opaque(store)
        handle = pages.prefetch(make_keys(600), deadline_s=LONG_S)  # twenty seconds, were it not cancelled
        until(handle.future.running)
        assert check(pages, KEYS[:8], deadline_s=LONG_S).all_ok
        assert not handle.done
        assert handle.progress.warm < 600
        handle.cancel()


def test_a_prefetch_gives_way_to_a_load_of_all_its_pages_and_none_is_read_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, begun, before_load = [True], threading.Event(), Prefetches.before_load
    in_the_middle = Fault(
        FaultKind.HANG, op=Op.READ, match=lambda plan: (plan.file_offset > 1 << 19) & held[0]
    )

    def watched(me: Prefetches, keys: U8) -> tuple[npt.NDArray[np.bool_], list[Prefetch]]:
        coming = before_load(me, keys)
        begun.set()
        return coming

    monkeypatch.setattr(Prefetches, "before_load", watched)
    engine = FaultyEngine(PosixEngine(2), [in_the_middle], seed=0)
    with small_store(path, own_engine=engine, host_cache="8MiB", chunk_bytes="64KiB") as store:
        pages, keys = opaque(store), make_keys(600)
        handle = pages.prefetch(keys)
        until(lambda: handle.progress.warm > 0 and engine.injected["hang"] > 0)
        loading = pages.load(keys, memory := np.empty((600, 8192), np.uint8))
        assert begun.wait(WAIT_S)
        held[0] = False
        engine.release_hangs()
        assert loading.result(WAIT_S).all_ok
        assert np.array_equal(memory, truth(keys, 8192))
        assert handle.wait(WAIT_S)
        assert 0 < handle.progress.warm < 600
        assert store.stats()["drive_bytes_read"] == 600 * 8192


def test_a_load_that_waits_for_a_prefetch_can_be_cancelled(path: Path) -> None:
    engine = hang_once()
    with small_store(path, own_engine=engine, host_cache="8MiB") as store:
        pages = opaque(store)
        stuck = pages.prefetch(KEYS, deadline_s=LONG_S)
        until(lambda: engine.injected["hang"] == 1)
        memory = np.empty((20, 8192), np.uint8)
        loading = pages.load(KEYS[:20], memory, deadline_s=LONG_S)
        until(loading.running)
        loading.cancel()
        assert loading.result(LONG_S / 4).reasons() == {"MISS_CANCELLED": 20}
        engine.release_hangs()
        assert stuck.wait(WAIT_S)

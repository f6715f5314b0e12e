"""What was deleted stays away, whatever was bringing it into the host cache or onto the drive meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import BoundNamespace, PageStatus, Store
from gdsstore.engines.base import Op
from gdsstore.engines.faults import Fault, FaultKind
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from tests.store.helpers import WAIT_S, load, make_keys, opaque, save, small_store, truth

KEYS = make_keys(40)
HOLD_S = 10.0


def held_store(path: Path, op: Op, **settings: Any) -> tuple[Store, FaultyEngine]:
    """A store with a host cache whose first transfer in one direction waits until `release_hangs`."""
    engine = FaultyEngine(PosixEngine(2), [Fault(FaultKind.HANG, op=op, limit=1)], seed=0)
    return small_store(path, own_engine=engine, host_cache="8MiB", **settings), engine


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def start_load(pages: BoundNamespace) -> Future[Any]:
    return pages.load(KEYS, np.empty((40, 8192), np.uint8), deadline_s=HOLD_S)


def start_prefetch(pages: BoundNamespace) -> Future[Any]:
    return pages.prefetch(KEYS, deadline_s=HOLD_S).future


@pytest.mark.parametrize("bring", [start_load, start_prefetch])
@pytest.mark.parametrize("drop", [lambda pages: pages.delete(KEYS), lambda pages: pages.clear()])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_was_being_read_when_it_was_dropped_does_not_stay_warm(
    tmp_path: Path,
    bring: Callable[[BoundNamespace], Future[Any]],
    drop: Callable[[BoundNamespace], object],
    policy: str,
) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    store, engine = held_store(tmp_path / "s", Op.READ, write_policy=policy)
    with store:
        pages = opaque(store)
        under_way = bring(pages)
        until(lambda: engine.injected["hang"] == 1)
        drop(pages)
        engine.release_hangs()
        under_way.result(WAIT_S)
        assert not pages.contains(KEYS).any()
        assert load(pages, KEYS)[0].count(PageStatus.MISS_ABSENT) == 40


def test_a_page_on_trial_that_was_dropped_while_it_was_written_is_on_no_drive(tmp_path: Path) -> None:
    store, engine = held_store(tmp_path / "s", Op.WRITE, write_policy="write_through_selective")
    with store:
        pages = opaque(store)
        assert save(pages, KEYS).all_ok
        assert load(pages, KEYS)[0].all_ok  # the second use: it is written behind the call
        until(lambda: engine.injected["hang"] == 1)
        with ThreadPoolExecutor(1) as pool:
            dropping = pool.submit(pages.delete, KEYS)
            until(lambda: not pages.contains(KEYS).any())
            engine.release_hangs()
            assert dropping.result(WAIT_S).all()
        assert not pages.contains(KEYS).any()
    with small_store(tmp_path / "s") as store:
        assert not opaque(store).contains(KEYS).any()


def test_saving_what_is_warm_and_was_deleted_stores_it_again(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", host_cache="8MiB") as store:
        pages = opaque(store)
        assert save(pages, KEYS).all_ok
        assert pages.delete(KEYS).all()
        assert save(pages, KEYS).count(PageStatus.SAVED) == 40
        result, got = load(pages, KEYS)
        assert result.all_ok
        assert (got == truth(KEYS, 8192)).all()

"""What hangs ends at its deadline, and its memory is kept until the drive has let go of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import Store
from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind, FaultyEngine
from gdsstore.transfer.results import CallResult
from tests.store.helpers import check, forget_catalog, load, make_keys, opaque, save, small_store
from tests.transfer.faults import fault, faulty, reaching

KEYS = make_keys(200)
DEADLINE_S = 0.6
TIMES_S = (DEADLINE_S, 3.0, 15.0, 60.0)  # the first is enough for most machines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def waits(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@pytest.fixture
def hanging(path: Path) -> Iterator[tuple[Store, FaultyEngine]]:
    """A store with 200 pages in which the next requests hang."""
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
    engine = faulty(fault(FaultKind.HANG))
    with small_store(path, own_engine=engine, zero_copy=False) as store:
        store.moving().staging.arena()
        yield store, engine
        engine.release_hangs()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.monotonic()
    return call(), time.monotonic() - start


def test_a_load_that_hangs_ends_at_its_deadline_and_its_memory_is_kept(
    hanging: tuple[Store, FaultyEngine],
) -> None:
    store, engine = hanging
    namespace = opaque(store)
    (result, _), seconds = reaching(
        engine, lambda: timed(lambda: load(namespace, KEYS, deadline_s=DEADLINE_S))
    )
    assert result.reasons() == {"MISS_DEADLINE": 200}
    assert DEADLINE_S / 2 < seconds < 10
    arena = store.moving().staging.arena()
    assert result.memory_in_use
    assert arena.stats().quarantined_bytes > 0
    assert store.stats()["stuck_transfers"] > 0
    store.sweep()
    assert result.memory_in_use  # it still hangs
    assert namespace.contains(KEYS).all()  # late is not damaged
    engine.release_hangs()
    waits(lambda: not result.memory_in_use)
    store.sweep()
    lease = arena.lease(arena.size_bytes, 10)  # every byte can be had again
    lease.release()
    assert arena.stats().quarantined_bytes == 0


def test_a_save_that_hangs_ends_at_its_deadline_and_is_never_seen(
    hanging: tuple[Store, FaultyEngine], path: Path
) -> None:
    store, engine = hanging
    namespace = opaque(store)
    more = make_keys(100, "more")
    result, seconds = reaching(engine, lambda: timed(lambda: save(namespace, more, deadline_s=DEADLINE_S)))
    assert result.reasons() == {"FAILED_DEADLINE": 100}
    assert DEADLINE_S / 2 < seconds < 10
    assert result.memory_in_use
    assert not namespace.contains(more).any()
    engine.release_hangs()  # the bytes arrive now: too late
    waits(lambda: not result.memory_in_use)
    store.sweep()
    assert not namespace.contains(more).any()
    forget_catalog_of(store, path)
    with small_store(path) as store:
        assert not opaque(store).contains(more).any()
        assert save(opaque(store), more).all_ok
        assert check(opaque(store), np.concatenate([KEYS, more])).all_ok


def forget_catalog_of(store: Store, path: Path) -> None:
    store.close()
    forget_catalog(path)


def test_a_segment_with_a_write_under_way_is_not_given_to_anybody(
    hanging: tuple[Store, FaultyEngine],
) -> None:
    store, engine = hanging
    namespace = opaque(store)
    result = reaching(engine, lambda: save(namespace, make_keys(10, "late"), deadline_s=DEADLINE_S))
    assert result.memory_in_use
    stuck = [owned.segment_id for owned in store.pool._owned.values()]
    assert stuck
    for _ in range(10):
        freed = store.reclaimer.reclaim_one()
        assert freed is None or freed.segment_id not in stuck
    engine.release_hangs()
    waits(lambda: not result.memory_in_use)
    store.sweep()
    assert not store.pool._owned


def test_other_calls_go_on_while_one_hangs(path: Path) -> None:
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
    engine = faulty(fault(FaultKind.HANG, op=Op.READ, limit=1))
    with small_store(path, own_engine=engine) as store:
        namespace = opaque(store)
        late, _ = reaching(engine, lambda: load(namespace, KEYS[:1], deadline_s=DEADLINE_S))
        assert late.reasons() == {"MISS_DEADLINE": 1}
        assert check(namespace, KEYS).all_ok
        assert save(namespace, make_keys(50, "more")).all_ok
        assert namespace.lookup(KEYS) == 200
        engine.release_hangs()


def test_pages_before_the_one_that_hangs_are_loaded(path: Path) -> None:
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
    engine = faulty(fault(FaultKind.HANG, op=Op.READ, match=lambda plan: plan.file_offset > 1 << 19))
    with small_store(path, own_engine=engine, chunk_bytes="64KiB") as store:
        for deadline_s in TIMES_S:
            result = check(opaque(store), KEYS, deadline_s=deadline_s)
            if result.prefix > 20:
                break
        assert set(result.reasons()) == {"LOADED", "MISS_DEADLINE"}
        assert result.prefix > 20
        engine.release_hangs()


def test_closing_returns_though_something_hangs(path: Path) -> None:
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
    engine = faulty(fault(FaultKind.HANG))
    store = small_store(path, own_engine=engine, zero_copy=False)
    store.moving().staging.arena()
    results: list[CallResult] = [
        reaching(engine, lambda: load(opaque(store), KEYS, deadline_s=DEADLINE_S)[0]),
        reaching(engine, lambda: save(opaque(store), make_keys(5, "x"), deadline_s=DEADLINE_S)),
    ]
    _, seconds = timed(lambda: store.close(timeout_s=0.3))
    assert seconds < 10
    assert all(result.memory_in_use for result in results)
    with small_store(path) as store:  # and others can use the store, also from this process
        assert check(opaque(store), KEYS).all_ok
        assert save(opaque(store), make_keys(5, "x")).all_ok
    engine.release_hangs()


def test_a_deadline_that_has_passed_already_is_a_miss_and_no_error(path: Path) -> None:
    with small_store(path) as store:
        namespace = opaque(store)
        assert save(namespace, KEYS[:10], deadline_s=0.0).reasons() == {"FAILED_DEADLINE": 10}
        assert save(namespace, KEYS).all_ok
        assert load(namespace, KEYS[:10], deadline_s=0.0)[0].reasons() == {"MISS_DEADLINE": 10}
        assert load(namespace, KEYS[:10], deadline_s=-5)[0].reasons() == {"MISS_DEADLINE": 10}
        assert check(namespace, KEYS).all_ok


def test_slow_drives_are_waited_for(path: Path) -> None:
    with small_store(path, own_engine=faulty(fault(FaultKind.DELAY, 0.2, delay_s=0.02))) as store:
        assert save(opaque(store), KEYS).all_ok
        assert check(opaque(store), KEYS).all_ok

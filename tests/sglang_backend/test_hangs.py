"""A drive that does not answer: calls return as misses in time, and what it delivers later reaches nobody."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cpu_fixtures
import pytest
import torch
from cpu_fixtures import MHA

from gdsstore.engines.faulty import FaultKind
from tests.sglang_backend.backends import FilledPool, make_keys, saved
from tests.sglang_backend.conftest import Attach
from tests.sglang_backend.drives import Drive, install, waits

PAGES = 8
LIMIT_S = 1.0
NEW = 0x77


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch, attach: Attach) -> Iterator[Drive]:
    """After `attach`, so that it is let go before the backends close."""
    drive = install(monkeypatch, Drive(FaultKind.HANG, pins=True))
    yield drive
    drive.let_go()


@pytest.fixture(params=["in place", "staged"])
def filled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FilledPool:
    """`in place`: pieces of three whole blocks, which the drive reads and writes where they are."""
    if request.param == "in place":
        monkeypatch.setattr(cpu_fixtures, "HEADS", 8)
    filled = FilledPool(MHA, "page_first", PAGES)
    assert filled.pool.is_stride_page_aligned() == (request.param == "in place")
    return filled


def stored(attach: Attach, filled: FilledPool, *others: Any, **settings: Any) -> Any:
    """A backend whose calls have little time, on a store with the pool's pages. First one with more time saves and loads them, so
    that nothing has to be compiled later."""
    first = attach(filled, *others, **settings)
    saved(first, filled)
    assert first.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES
    filled.wipe()
    first.close()
    return attach(filled, *others, call_limit_s=LIMIT_S, **settings)


def memory(filled: FilledPool) -> torch.Tensor:
    return filled.pool.kv_buffer.view(torch.uint8).clone()


def test_a_read_that_hangs_misses_in_time_and_its_bytes_never_arrive(
    drive: Drive, filled: FilledPool, attach: Attach
) -> None:
    backend = stored(attach, filled)
    drive.broken = True
    assert drive.hangs(lambda: backend.batch_get_v1(filled.keys, filled.indices())) == [False] * PAGES
    assert drive.count > 0
    # The pages are somebody else's now.
    for start in filled.starts:
        page = torch.full((filled.truth[0].numel(),), NEW, dtype=torch.uint8)
        filled.pool.set_from_flat_data_page(start, page.view(cpu_fixtures.DTYPE))
    before = memory(filled)
    drive.let_go()
    waits(lambda: backend.batch_exists(filled.keys) == PAGES)
    assert torch.equal(memory(filled), before), "late bytes arrived in the host pool"
    assert all((page == NEW).all() for page in filled.pages())
    assert all((page == 0xEE).all() for page in filled.pages(beside=1)), "a neighbour was changed"
    waits(lambda: backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES)
    assert all(filled.holds_truth())


def test_pages_that_came_before_the_one_that_hangs_are_loaded(
    drive: Drive, filled: FilledPool, attach: Attach
) -> None:
    backend = stored(attach, filled)
    drive.hits = lambda plan: plan.file_offset >= plan.file_offset.max()
    drive.broken = True
    loaded = drive.hangs(lambda: backend.batch_get_v1(filled.keys, filled.indices()))
    held = filled.holds_truth()
    assert not all(loaded)
    assert [there for there, ok in zip(held, loaded, strict=True) if ok] == [True] * sum(loaded)
    before = memory(filled)
    drive.let_go()
    waits(lambda: backend.batch_exists(filled.keys) == PAGES)
    assert torch.equal(memory(filled), before)


def test_a_write_that_hangs_fails_in_time_and_is_never_seen(
    drive: Drive, filled: FilledPool, attach: Attach
) -> None:
    backend = stored(attach, filled)
    more = make_keys(PAGES)
    drive.broken = True
    assert drive.hangs(lambda: backend.batch_set_v1(more, filled.indices())) == [False] * PAGES
    assert drive.count > 0
    drive.let_go()
    waits(lambda: backend.batch_exists(filled.keys) == PAGES)
    assert backend.batch_exists(more) == 0
    assert backend.batch_get_v1(more, filled.indices()) == [False] * PAGES
    waits(lambda: backend.batch_set_v1(more, filled.indices()) == [True] * PAGES)


def test_while_the_drive_is_stuck_everything_misses_and_it_is_not_asked(
    drive: Drive, filled: FilledPool, attach: Attach
) -> None:
    other = FilledPool(MHA, "page_first", 3)
    backend = stored(attach, filled, ("swa", other))
    swa = other.transfer("swa")
    waits(lambda: backend.batch_set_v2([swa]) == {"swa": [True] * 3})
    drive.broken = True
    drive.hangs(lambda: backend.batch_get_v1(filled.keys, filled.indices()))
    asked = drive.requests
    before = memory(filled)
    assert backend.batch_exists(filled.keys) == 0
    assert backend.batch_exists_v2(filled.keys, [swa]).kv_hit_pages == 0
    assert backend.exists(filled.keys[0]) is False
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [False] * PAGES
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [False] * PAGES
    assert backend.batch_get_v2([swa]) == {"swa": [False] * 3}
    assert backend.batch_get(filled.keys[:1], [filled.pool.get_dummy_flat_data_page()]) == [None]
    assert backend.batch_set(filled.keys[:1], [filled.pool.get_dummy_flat_data_page()]) is False
    assert drive.requests == asked
    assert torch.equal(memory(filled), before)
    drive.let_go()
    waits(lambda: backend.batch_exists(filled.keys) == PAGES)
    waits(lambda: backend.batch_get_v2([swa]) == {"swa": [True] * 3})


def test_pools_of_one_call_are_all_let_go_of(drive: Drive, filled: FilledPool, attach: Attach) -> None:
    other = FilledPool(MHA, "page_first", 3)
    backend = stored(attach, filled, ("swa", other))
    transfers = [filled.transfer("kv"), other.transfer("swa")]
    waits(lambda: backend.batch_set_v2(transfers) == {"kv": [True] * PAGES, "swa": [True] * 3})
    other.wipe()
    drive.broken = True
    missed = drive.hangs(lambda: backend.batch_get_v2(transfers))
    assert missed == {"kv": [False] * PAGES, "swa": [False] * 3}
    before = memory(filled), memory(other)
    drive.let_go()
    waits(lambda: backend.batch_exists(filled.keys) == PAGES)
    assert torch.equal(memory(filled), before[0])
    assert torch.equal(memory(other), before[1])


def test_a_flat_read_that_hangs_misses_in_time_and_its_memory_is_kept_for_the_drive(
    drive: Drive, filled: FilledPool, attach: Attach
) -> None:
    backend = attach(filled, call_limit_s=LIMIT_S, interface_v1=None)
    truth = [page.view(cpu_fixtures.DTYPE) for page in filled.truth]
    waits(lambda: backend.batch_set(filled.keys, truth))
    waits(lambda: None not in backend.batch_get(filled.keys, empty_pages(filled)))
    drive.broken = True
    kept = flat_read_that_hangs(drive, backend, filled)
    gc.collect()
    assert all(target() is not None for target in kept)
    drive.let_go()
    waits(lambda: backend.batch_exists(filled.keys) == PAGES)
    backend._store.sweep()
    gc.collect()
    assert all(target() is None for target in kept)


def empty_pages(filled: FilledPool) -> list[torch.Tensor]:
    return [filled.pool.get_dummy_flat_data_page() for _ in filled.keys]


def flat_read_that_hangs(drive: Drive, backend: Any, filled: FilledPool) -> list[weakref.ref[torch.Tensor]]:
    """References to its pages, which nobody else holds."""
    targets = empty_pages(filled)
    assert drive.hangs(lambda: backend.batch_get(filled.keys, targets)) == [None] * PAGES
    assert drive.count > 0
    assert not any(target.any() for target in targets)
    return [weakref.ref(target) for target in targets]


def test_memory_that_cannot_be_replaced_is_waited_for(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """Pinned for the GPU, say: then the call is late rather than the memory overwritten."""
    monkeypatch.setattr(cpu_fixtures, "HEADS", 8)
    filled = FilledPool(MHA, "page_first", PAGES)
    backend = stored(attach, filled)
    filled.pool.pin_memory = True
    drive.broken = True
    caplog.set_level(logging.CRITICAL, "gdsstore.sglang")

    def give_way() -> bool:
        if any("cannot be replaced" in record.getMessage() for record in caplog.records):
            drive.let_go()
            return True
        return False

    loaded: list[bool] = []

    def is_late() -> bool:
        """Unless its time is over before it reaches the drive."""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(backend.batch_get_v1, filled.keys, filled.indices())
            try:
                waits(lambda: give_way() or future.done())
                loaded[:] = future.result(20)
            finally:
                if not future.done():
                    drive.let_go()
        return not drive.broken

    waits(is_late)
    assert loaded == [False] * PAGES
    before = memory(filled)
    waits(lambda: backend.batch_exists(filled.keys) == PAGES)
    assert torch.equal(memory(filled), before)


def test_closing_though_the_drive_is_stuck_returns(drive: Drive, filled: FilledPool, attach: Attach) -> None:
    backend = stored(attach, filled)
    drive.broken = True
    drive.hangs(lambda: backend.batch_get_v1(filled.keys, filled.indices()))
    drive.returns(backend.close)
    assert backend.batch_exists(filled.keys) == 0

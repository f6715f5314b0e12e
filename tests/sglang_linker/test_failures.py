"""What goes wrong on the drive: one failed batch at most, and never wrong bytes."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import pytest
from cpu_fixtures import DEVICE_TOKENS, MHA, PAGE_SIZE, linker_request

from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind
from tests.sglang_backend.drives import Drive, install
from tests.sglang_linker.tree import PAGES, TOKENS, equal, keys_of, tree_of
from tests.sglang_server.stored import damage

BAD = 7  # page


@pytest.fixture(params=["rust", "python"])
def core(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_damaged_page_fails_one_request_and_its_retry_computes(core: str, tmp_path: Path) -> None:
    with tree_of(MHA, core, tmp_path) as tree:
        expected = tree.compute(5000)
        tree.flush()
        assert damage(tmp_path, [keys_of(5000)[BAD]]) == 1

        request, rows = tree.queue(5000)
        assert tree.run_batch(request) == [request]
        assert request.skip_radix_cache_insert
        assert request.discard_output_reason.status_code == HTTPStatus.SERVICE_UNAVAILABLE
        assert tree.on_device(5000) == 0
        tree.allocator.free(rows)

        head = BAD * PAGE_SIZE
        assert tree.stored_tokens(5000) == head
        assert equal(tree.load(5000), [layer[:head] for layer in expected])


def test_a_page_computed_again_takes_the_damaged_ones_place(core: str, tmp_path: Path) -> None:
    with tree_of(MHA, core, tmp_path) as tree:
        tree.compute(5000)
        tree.flush()
        damage(tmp_path, [keys_of(5000)[BAD]])
        request, _ = tree.queue(5000)
        assert tree.run_batch(request) == [request]
        tree.flush()
        saved = tree.linker.offloads.pages_saved
        rows = tree.allocator.alloc(TOKENS)
        tree.insert(5000, rows)  # the other pages are stored as they were: only the last ones are rewritten
        assert tree.linker.offloads.pages_saved == saved + 1
        tree.flush()
        assert tree.stored_tokens(5000) == TOKENS
        tree.load(5000)


def test_one_bad_page_fails_its_batch_and_no_later_one(core: str, tmp_path: Path) -> None:
    with tree_of(MHA, core, tmp_path) as tree:
        good = tree.compute(9000, 4 * PAGE_SIZE)
        tree.compute(5000)
        tree.flush()
        damage(tmp_path, [keys_of(5000)[0]])
        first, _ = tree.queue(9000, 4 * PAGE_SIZE)
        second, _ = tree.queue(5000)
        assert tree.run_batch(first, second) == [first, second]
        assert tree.stored_tokens(5000) == 0
        assert equal(tree.load(9000, 4 * PAGE_SIZE), good)


def test_a_failed_load_is_not_remembered_as_a_hit_by_others_that_wait(core: str, tmp_path: Path) -> None:
    with tree_of(MHA, core, tmp_path) as tree:
        tree.compute(5000)
        tree.flush()
        waiting = linker_request()
        assert tree.stored_tokens(5000, request=waiting) == TOKENS
        damage(tmp_path, [keys_of(5000)[BAD]])
        request, _ = tree.queue(5000)
        assert tree.run_batch(request) == [request]
        assert tree.stored_tokens(5000, request=waiting) == BAD * PAGE_SIZE


def test_a_drive_that_hangs_fails_the_load_in_time_and_is_not_asked_again(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.HANG, Op.READ))
    with tree_of(MHA, core, tmp_path, load_deadline_s=3.0, io_deadline_s=3.0, drive_breaker="off") as tree:
        tree.compute(5000)
        tree.flush()
        drive.broken = True
        request, rows = tree.queue(5000)
        assert drive.returns(lambda: tree.run_batch(request)) == [request]
        before = tree.kv(rows)
        assert tree.stored_tokens(5000) == 0, "the retry would be aborted in turn"
        drive.let_go()
        tree.compute(9000, 2 * PAGE_SIZE)
        tree.evict_tree()
        tree.load(9000, 2 * PAGE_SIZE)  # the drive is asked again, and what hung goes on
        assert equal(tree.kv(rows), before), "late bytes reached rows that SGLang had taken back"


def test_an_offload_that_fails_is_not_reported_as_stored(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.ERRNO, Op.WRITE))
    with tree_of(MHA, core, tmp_path, drive_breaker="off") as tree:
        drive.broken = True
        tree.compute(5000)
        assert tree.linker.offloads.pages_saved == 0
        tree.evict()
        assert tree.allocator.available_size() == DEVICE_TOKENS, "rows stay locked"
        assert tree.stored_tokens(5000) == 0
        drive.let_go()
        expected = tree.compute(5000)
        tree.flush()
        assert equal(tree.load(5000), expected)


def test_a_backlog_that_is_full_drops_and_counts(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.HANG, Op.WRITE))
    with tree_of(MHA, core, tmp_path, backlog_pages=PAGES, offload_deadline_s=5.0) as tree:
        drive.broken = True
        first, second = tree.allocator.alloc(TOKENS), tree.allocator.alloc(2 * PAGE_SIZE)
        tree.insert(5000, first, wait=False)
        tree.insert(9000, second, wait=False)
        assert tree.linker.offloads.pages_dropped == 2
        assert len(tree.cache.linker.pending_offloads) == 1
        drive.let_go()
        tree.insert(20000, tree.allocator.alloc(PAGE_SIZE))
        assert tree.stored_tokens(9000, 2 * PAGE_SIZE) == 0

"""Whatever goes wrong below the backend is a miss or a failed write of the pages that it happened to, and never an exception."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_fixtures import MHA
from sglang.srt.observability.metrics_collector import StorageMetrics

from gdsstore import BoundNamespace, Store
from gdsstore.drive_pages import DrivePages
from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind
from gdsstore.errors import StoreError
from tests.sglang_backend.backends import FilledPool, make_keys, raw_keys, saved
from tests.sglang_backend.conftest import Attach
from tests.sglang_backend.drives import Drive, install
from tests.store.helpers import flip, locate, segments

PAGES = 8
BAD = 5
ALL_BUT_BAD = [page != BAD for page in range(PAGES)]


@pytest.fixture
def filled() -> FilledPool:
    return FilledPool(MHA, "page_first", PAGES)


def kv(backend: Any) -> BoundNamespace:
    bound = backend._pools.bound("kv")
    assert isinstance(bound, BoundNamespace)
    return bound


def place(backend: Any, filled: FilledPool) -> int:
    """Where in its segment the bad page lies; all pages lie in one segment."""
    segment, offset = locate(kv(backend), raw_keys(filled.keys))
    assert len(set(segment.tolist())) == 1
    return int(offset[BAD])


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Counts the pages of each call of a method of the store."""
    calls: list[int] = []
    method = getattr(BoundNamespace, name)

    def count(self: BoundNamespace, keys: Any, *args: Any, **options: Any) -> Any:
        calls.append(len(keys))
        return method(self, keys, *args, **options)

    monkeypatch.setattr(BoundNamespace, name, count)
    return calls


@pytest.mark.parametrize("kind", [FaultKind.ERRNO, FaultKind.SHORT])
def test_a_read_error_is_a_miss_of_its_page_until_the_drive_works_again(
    kind: FaultKind, filled: FilledPool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(kind, Op.READ))
    backend = attach(filled)
    saved(backend, filled)
    bad = place(backend, filled)
    drive.hits = lambda plan: (plan.file_offset <= bad) & (bad < plan.file_offset + plan.length)
    drive.broken = True
    assert backend.batch_get_v1(filled.keys, filled.indices()) == ALL_BUT_BAD
    assert drive.count > 0
    assert filled.holds_truth() == ALL_BUT_BAD
    drive.broken = False
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert all(filled.holds_truth())


def test_bytes_that_arrive_wrong_are_a_miss_and_the_page_is_dropped(
    filled: FilledPool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.CORRUPT, Op.READ))
    backend = attach(filled)
    saved(backend, filled)
    bad = place(backend, filled)
    drive.hits = lambda plan: (plan.file_offset <= bad) & (bad < plan.file_offset + plan.length)
    drive.broken = True
    loaded = backend.batch_get_v1(filled.keys, filled.indices())
    assert not all(loaded)
    held = filled.holds_truth()
    assert all(there for there, ok in zip(held, loaded, strict=True) if ok)
    assert backend.batch_exists(filled.keys) == loaded.index(False)


def test_a_page_damaged_on_the_drive_is_a_miss_and_the_next_write_mends_it(
    filled: FilledPool, attach: Attach, tmp_path: Path
) -> None:
    backend = attach(filled)
    saved(backend, filled)
    (segment,) = segments(tmp_path / "store")
    flip(segment, 8 * (place(backend, filled) + 1234))
    assert backend.batch_exists(filled.keys) == PAGES  # nobody has looked yet
    assert backend.batch_get_v1(filled.keys, filled.indices()) == ALL_BUT_BAD
    assert filled.holds_truth() == ALL_BUT_BAD
    assert backend.batch_exists(filled.keys) == BAD
    filled.pool.set_from_flat_data_page(filled.starts[BAD], filled.truth[BAD].view(filled.pool.dtype))
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True] * PAGES
    filled.wipe()
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert all(filled.holds_truth())


def test_a_segment_that_is_gone_is_a_miss_of_its_pages(
    filled: FilledPool, attach: Attach, tmp_path: Path
) -> None:
    backend = attach(filled)
    saved(backend, filled)
    backend.close()
    (segment,) = segments(tmp_path / "store")
    segment.unlink()
    backend = attach(filled)
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [False] * PAGES
    assert backend.batch_exists(filled.keys) == 0
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES


WRITE_ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT]


@pytest.mark.parametrize("code", WRITE_ERRORS)
def test_a_write_that_fails_is_tried_once_more(
    code: int, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would not, and a page that is not written fails its whole batch."""
    filled = FilledPool(MHA, "page_first", 1)
    # The store itself asks the drive twice.
    drive = install(monkeypatch, Drive(FaultKind.ERRNO, Op.WRITE, errno_code=code, limit=2))
    backend = attach(filled)
    calls = counted(monkeypatch, "save")
    drive.broken = True
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True]
    assert (drive.count, calls) == (2, [1, 1])
    filled.wipe()
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True]
    assert all(filled.holds_truth())


def test_only_the_pages_that_failed_are_tried_again(
    filled: FilledPool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.ERRNO, Op.WRITE, limit=2))
    backend = attach(filled)
    drive.hits = lambda plan: plan.file_offset >= plan.file_offset.max()
    calls = counted(monkeypatch, "save")
    drive.broken = True
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert calls[0] == PAGES
    assert len(calls) == 2
    assert 0 < calls[1] < PAGES
    filled.wipe()
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert all(filled.holds_truth())


@pytest.mark.parametrize("code", WRITE_ERRORS)
def test_a_drive_that_takes_no_writes_fails_them_and_serves_what_it_has(
    code: int, filled: FilledPool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = install(monkeypatch, Drive(FaultKind.ERRNO, Op.WRITE, errno_code=code))
    backend = attach(filled)
    saved(backend, filled)
    calls = counted(monkeypatch, "save")
    more = make_keys(PAGES)
    drive.broken = True
    assert backend.batch_set_v1(more, filled.indices()) == [False] * PAGES
    assert calls == [PAGES, PAGES]
    assert backend.batch_exists(more) == 0
    assert backend.batch_set_v1([*filled.keys[:4], *more[4:]], filled.indices()) == [True] * 4 + [False] * 4
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES
    drive.broken = False
    end = time.monotonic() + 60  # it may be left alone for a second or two
    while backend.batch_set_v1(more, filled.indices()) != [True] * PAGES and time.monotonic() < end:
        time.sleep(0.1)
    assert backend.batch_exists(more) == PAGES


def test_a_store_that_is_full_makes_room(filled: FilledPool, attach: Attach) -> None:
    backend = attach(filled, capacity="4MiB", grace_s=0)
    written = [make_keys(PAGES) for _ in range(100)]
    for keys in written:
        assert backend.batch_set_v1(keys, filled.indices()) == [True] * PAGES
    assert backend.batch_exists(written[-1]) == PAGES
    assert backend.batch_exists(written[0]) == 0


def test_flat_calls_with_odd_arguments_are_misses(filled: FilledPool, attach: Attach) -> None:
    backend = attach(filled, interface_v1=None)
    page = filled.pool.get_dummy_flat_data_page()
    strided = torch.zeros(2 * page.numel(), dtype=page.dtype)[::2]
    for value in (None, page[:-1], torch.zeros(0)):
        assert backend.set(filled.keys[0], value) is False
        assert backend.get(filled.keys[0], value) is None
    assert backend.set(filled.keys[0], strided + 1) is True
    assert backend.get(filled.keys[0], strided) is None
    assert backend.set(filled.keys[1], strided) is True  # a copy of it is stored
    assert torch.equal(backend.get(filled.keys[1], page.fill_(7)), torch.zeros_like(page))
    assert backend.batch_get(filled.keys[:2], [page]) == [None, None]
    assert backend.batch_get(filled.keys[:2]) == [None, None]


class UnforeseenError(Exception):
    """Not of the library's own kinds."""


BREAKS = [
    (BoundNamespace, "load"),
    (BoundNamespace, "save"),
    (BoundNamespace, "lookup"),
    (BoundNamespace, "contains"),
    (BoundNamespace, "clear"),
    (DrivePages, "load"),
    (DrivePages, "save"),
    (Store, "submit"),
    (Store, "using"),
]


@pytest.mark.parametrize(
    "error", [UnforeseenError("bug"), StoreError("broken"), OSError(5, "gone"), MemoryError()]
)
@pytest.mark.parametrize(
    ("owner", "method"), BREAKS, ids=[f"{owner.__name__}.{name}" for owner, name in BREAKS]
)
def test_no_exception_leaves_the_backend(
    owner: type, method: str, error: Exception, filled: FilledPool, attach: Attach
) -> None:
    swa = FilledPool(MHA, "page_first", 2)
    backend = attach(filled, ("swa", swa), facts={"enable_storage_metrics": True})
    saved(backend, filled)

    def broken(*args: Any, **options: Any) -> Any:
        raise error

    page = filled.pool.get_dummy_flat_data_page()
    reads = method not in ("load", "submit", "using")
    writes = method not in ("save", "submit", "using")
    finds = method not in ("lookup", "using")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, broken)
        assert backend.batch_exists(filled.keys) == finds * PAGES
        assert backend.batch_exists_v2(filled.keys).kv_hit_pages == finds * PAGES
        assert backend.batch_exists_v2(filled.keys, [swa.transfer("swa")]).kv_hit_pages == 0
        assert backend.batch_get_v1(filled.keys, filled.indices()) == [reads] * PAGES
        assert backend.batch_set_v1(make_keys(PAGES), filled.indices()) == [writes] * PAGES
        assert backend.batch_set_v2([swa.transfer("swa")]) == {"swa": [writes] * 2}
        assert backend.batch_get_v2([swa.transfer("swa")]) == {"swa": [reads and writes] * 2}
        assert backend.exists(filled.keys[0]) == (method not in ("contains", "using"))
        assert backend.set(filled.keys[0], page) == writes
        assert (backend.get(filled.keys[0], page) is not None) == reads
        assert isinstance(backend.get_stats(), StorageMetrics)
        assert backend.clear() == (method not in ("clear", "using"))
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES


def test_one_pools_error_does_not_stop_the_others(
    filled: FilledPool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    swa = FilledPool(MHA, "page_first", 2)
    backend = attach(filled, ("swa", swa))
    transfers = [filled.transfer("kv"), swa.transfer("swa")]
    save = BoundNamespace.save

    def broken(self: BoundNamespace, *args: Any, **options: Any) -> Any:
        if self.namespace.pool == "kv":
            raise UnforeseenError("bug")
        return save(self, *args, **options)

    monkeypatch.setattr(BoundNamespace, "save", broken)
    assert backend.batch_set_v2(transfers) == {"kv": [False] * PAGES, "swa": [True] * 2}
    assert np.all(swa.holds_truth())
    assert backend.batch_get_v2(transfers) == {"kv": [False] * PAGES, "swa": [True] * 2}

"""What changed in host memory before it was written does not get onto the drive with a checksum that says that it is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gdsstore import Store
from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind
from gdsstore.tiers.rows import State
from tests.store.helpers import WAIT_S, check, load, make_keys, opaque, save, small_store, truth
from tests.tiers.caches import bytes_at, write_at
from tests.transfer.faults import fault, faulty

KEYS = make_keys(60)
BAD = [3, 17, 59]


def flip_in_memory(store: Store, keys: np.ndarray, page_bytes: int) -> None:
    """Flip a bit of the records of these keys in the host cache."""
    cache = store.cache._cache
    assert cache is not None
    for shelf in cache._core.shelves.values():
        ready = np.flatnonzero(shelf.rows["state"] == State.READY).astype(np.int32)
        names = [shelf.rows["key"][row].tobytes() for row in ready]
        for number, key in enumerate(keys):
            at = int(shelf.address_of(ready[[names.index(key.tobytes())]])[0]) + number * 1000 % page_bytes
            write_at(at, bytes([bytes_at(at, 1)[0] ^ 4]))


@pytest.mark.parametrize("page_bytes", [8192, 5000])
@pytest.mark.parametrize("way", ["plain", "sealed", "tried again"])
def test_a_record_that_changed_in_memory_is_dropped_and_counted(
    tmp_path: Path, page_bytes: int, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"encryption_key": "11" * 32} if way == "sealed" else {}
    own = faulty(fault(FaultKind.ERRNO, op=Op.WRITE, limit=1)) if way == "tried again" else None
    with small_store(
        tmp_path / "s", host_cache="8MiB", write_policy="write_back", own_engine=own, **more
    ) as store:
        pages = opaque(store, page_bytes)
        assert save(pages, KEYS, page_bytes).all_ok
        flip_in_memory(store, KEYS[BAD], page_bytes)
        assert store.cache.flush(WAIT_S) == 0
        stats = store.stats()
        assert stats["host_cache"]["damaged"] == stats["pages_failed_checksum"] == len(BAD)
        assert (stats["host_cache"]["written_back"], stats["pages_saved"]) == (57, 57)
        assert stats["host_cache"]["write_failures"] == 0
        assert "3 records of the host cache had changed" in caplog.text
        there = np.setdiff1d(np.arange(60), BAD)
        assert np.flatnonzero(pages.contains(KEYS)).tolist() == there.tolist()
        assert np.flatnonzero(check(pages, KEYS, page_bytes).ok).tolist() == there.tolist()
        # They can be saved again.
        assert save(pages, KEYS, page_bytes).all_ok
        assert check(pages, KEYS, page_bytes).all_ok
    with small_store(tmp_path / "s", **more) as store:
        assert check(opaque(store, page_bytes), KEYS, page_bytes).all_ok


def test_a_rebuild_does_not_find_what_was_not_to_be_written(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", host_cache="8MiB", write_policy="write_back") as store:
        pages = opaque(store)
        assert save(pages, KEYS).all_ok
        flip_in_memory(store, KEYS[BAD], 8192)
        assert store.cache.flush(WAIT_S) == 0
    for name in ("data.mdb", "lock.mdb"):
        (tmp_path / "s" / "catalog" / name).unlink()
    with small_store(tmp_path / "s") as store:
        result, memory = load(opaque(store), KEYS)
        assert np.flatnonzero(~result.ok).tolist() == BAD
        assert (memory[result.ok] == truth(KEYS, 8192)[result.ok]).all()

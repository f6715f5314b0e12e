"""A catalog whose writer hangs: saves end in time, none of their pages appears later, and the store can be closed."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.store.helpers import check, make_keys, opaque, save, small_store
from tests.transfer.late_drive import soon

SHORT_S = 0.3


def threads() -> int:
    return sum(thread.name == "gdsstore-call" for thread in threading.enumerate())


def test_a_catalog_that_nobody_lets_go_of_keeps_no_save(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", workers=4) as store:
        kept = make_keys(20, "kept")
        assert save(opaque(store), kept).all_ok
        owned, before = store.pool._owned, threads()
        with store.catalog.write():  # as another process that was stopped within a transaction
            tried = 0
            while tried < 4 or not any(segment.outstanding for segment in owned.values()):
                keys = make_keys(4, tried)
                assert save(opaque(store), keys, deadline_s=SHORT_S).reasons() == {"FAILED_DEADLINE": 4}
                assert check(opaque(store), kept).all_ok
                tried += 1
                assert tried < 50, "the slots of the one that waits are somebody else's already"
            assert threads() <= before + 2, "each save left a thread behind"
        soon(lambda: not any(segment.outstanding for segment in list(owned.values())))
        for number in range(tried):
            assert not opaque(store).contains(make_keys(4, number)).any()
            assert save(opaque(store), make_keys(4, number)).all_ok


def test_a_store_closes_under_a_transaction_that_waits(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s")
    assert save(opaque(store), make_keys(4)).all_ok
    with store.catalog.write():
        assert save(opaque(store), make_keys(4, "late"), deadline_s=SHORT_S).reasons() == {
            "FAILED_DEADLINE": 4
        }
        store.close(timeout_s=SHORT_S)
    soon(lambda: store.catalog._file < 0)
    with small_store(tmp_path / "s") as again:
        assert check(opaque(again), make_keys(4)).all_ok
        assert save(opaque(again), make_keys(4, "late")).all_ok

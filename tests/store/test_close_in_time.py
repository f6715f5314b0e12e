"""Closing takes the time that it was given, whatever hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gdsstore import DeadlineError
from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.faults import Fault, FaultKind
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from tests.store.helpers import WAIT_S, make_keys, opaque, save, small_store

KEYS = make_keys(20)
CLOSE_S = 3.0


def test_all_steps_of_closing_share_one_deadline(tmp_path: Path) -> None:
    """A load, a write-back, the engine and the staging memory: each of them hangs, and is waited for."""
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    read = threading.Event()

    def reads(plan: RangePlan) -> npt.NDArray[np.bool_]:
        read.set()
        return np.ones(len(plan), np.bool_)

    faults = [Fault(FaultKind.HANG, op=Op.READ, match=reads), Fault(FaultKind.HANG, op=Op.WRITE)]
    engine = FaultyEngine(PosixEngine(2), faults, seed=0)
    store = small_store(
        tmp_path / "s", own_engine=engine, host_cache="8MiB", write_policy="write_back", zero_copy=False
    )
    pages = opaque(store)
    assert save(pages, make_keys(20, "dirty")).all_ok
    loading = pages.load(KEYS, np.empty((20, 8192), np.uint8), deadline_s=60)
    assert read.wait(WAIT_S)
    start = time.monotonic()
    store.close(CLOSE_S)
    assert time.monotonic() - start < 2 * CLOSE_S
    assert isinstance(loading.exception(0), DeadlineError)
    engine.release_hangs()

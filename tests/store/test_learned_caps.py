"""What a store's chunks say of its volumes reaches what learns the caps from it, and what that finds is to be seen."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gdsstore.engines.base import Op
from gdsstore.engines.faults import Fault, FaultKind
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.transfer.caps import LearnedCaps
from gdsstore.volume.health import Breaker
from tests.store.helpers import load, make_keys, opaque, save, small_store

PAGES, PAGE_BYTES = 96, 8192


class Heard:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: Counter[Op] = Counter()
        self.disturbed = 0
        ended, disturbed = LearnedCaps.ended, LearnedCaps.disturbed

        def on_end(caps: LearnedCaps, volume: int, op: Op, nbytes: int, now: float) -> None:
            self.moved[op] += nbytes
            ended(caps, volume, op, nbytes, now)

        def on_disturbed(caps: LearnedCaps, volume: int) -> None:
            self.disturbed += 1
            disturbed(caps, volume)

        monkeypatch.setattr(LearnedCaps, "ended", on_end)
        monkeypatch.setattr(LearnedCaps, "disturbed", on_disturbed)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    return Heard(monkeypatch)


def test_every_chunk_that_moves_is_told_of(heard: Heard, tmp_path: Path) -> None:
    keys = make_keys(PAGES)
    with small_store(tmp_path / "s") as store:
        namespace = opaque(store, PAGE_BYTES)
        assert save(namespace, keys).all_ok
        result, _ = load(namespace, keys)
        assert result.all_ok
        (volume,) = store.stats()["transfers"]["volumes"]
    assert heard.moved[Op.WRITE] == volume["write_bytes"] >= PAGES * PAGE_BYTES
    assert heard.moved[Op.READ] == volume["read_bytes"] >= PAGES * PAGE_BYTES
    assert heard.disturbed == 0
    assert volume["read_cap_bytes"] == volume["write_cap_bytes"] == 8 * store.config.chunk_bytes


def test_what_does_not_move_at_the_first_try_teaches_nothing(heard: Heard, tmp_path: Path) -> None:
    keys = make_keys(PAGES)
    sick = threading.Event()
    fault = Fault(FaultKind.ERRNO, match=lambda plan: np.full(len(plan), sick.is_set()))
    engine = FaultyEngine(PosixEngine(2), [fault], seed=0)
    with small_store(tmp_path / "s", own_engine=engine) as store:
        namespace = opaque(store, PAGE_BYTES)
        assert save(namespace, keys).all_ok
        sick.set()
        assert not load(namespace, keys)[0].ok.any()
    assert heard.moved[Op.READ] == 0
    assert heard.disturbed > 0


def test_a_sick_volume_is_not_trusted(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", drive_breaker="auto") as store:
        learned = store._scheduler._policy._admission._learned
        assert learned is not None
        assert learned._trusted(0, Op.READ)
        for _ in range(20):
            store.health[Op.READ][0].record(ok=False, nbytes=0, seconds=0.01)
        assert store.health[Op.READ][0].breaker is not Breaker.CLOSED
        assert not learned._trusted(0, Op.READ)
        assert learned._trusted(0, Op.WRITE)

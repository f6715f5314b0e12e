"""What comes too late touches nothing: by then the caller may have given the memory to somebody else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.transfer.mover import Mover
from tests.store.helpers import check, load, make_keys, opaque, save, small_store

KEYS = make_keys(40)
DEADLINE_S = 0.2


def slow(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float = 2 * DEADLINE_S) -> None:
    """Makes a step of the mover take long, as a machine without a free core does."""
    step: Any = getattr(Mover, name)

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return step(*args, **options)

    monkeypatch.setattr(Mover, name, late)


def test_pages_whose_checksums_came_too_late_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(tmp_path / "s") as store:
        with monkeypatch.context() as patch:
            slow(patch, "raw_checksums")
            assert save(opaque(store), KEYS, deadline_s=DEADLINE_S).reasons() == {"FAILED_DEADLINE": 40}
        assert opaque(store).lookup(KEYS) == 0
        assert save(opaque(store), KEYS).all_ok
        check(opaque(store), KEYS)


def test_a_read_that_comes_too_late_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store(tmp_path / "s") as store:
        save(opaque(store), KEYS)
        files = store.moving().files
        pin = files.pin

        def late(*args: Any, **options: Any) -> Any:
            time.sleep(2 * DEADLINE_S)
            return pin(*args, **options)

        monkeypatch.setattr(files, "pin", late)
        result, pages = load(opaque(store), KEYS, deadline_s=DEADLINE_S)
        assert result.reasons() == {"MISS_DEADLINE": 40}
        assert not result.memory_in_use
        assert (np.asarray(pages) == np.asarray(pages).ravel()[0]).all(), "the memory was touched"


def test_staged_pages_that_come_too_late_are_not_copied_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(tmp_path / "s", zero_copy=False) as store:
        save(opaque(store), KEYS)
        slow(monkeypatch, "raw_checksums")
        result, pages = load(opaque(store), KEYS, deadline_s=DEADLINE_S)
        assert result.reasons() == {"MISS_DEADLINE": 40}
        assert (np.asarray(pages) == np.asarray(pages).ravel()[0]).all(), "the memory was touched"

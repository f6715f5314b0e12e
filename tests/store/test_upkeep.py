"""Upkeep goes on, whatever one of its steps does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gdsstore import VolumeError
from tests.store.helpers import WAIT_S, make_keys, opaque, save, small_store


@pytest.mark.parametrize(
    "error", [VolumeError("a drive"), OSError(5, "a drive"), RuntimeError("a bug"), KeyError("x")]
)
def test_a_turn_that_fails_is_logged_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with small_store(tmp_path / "s", maintain_interval_s=0.01) as store:
        turns = 0
        turn = store.upkeep.turn

        def fails_once() -> None:
            nonlocal turns
            turns += 1
            if turns == 1:
                raise error
            turn()

        monkeypatch.setattr(store.upkeep, "turn", fails_once)
        store.upkeep.nudge()
        end = time.monotonic() + WAIT_S
        while turns < 3 and time.monotonic() < end:
            time.sleep(0.001)
        assert turns >= 3
        assert "upkeep" in caplog.text
        assert save(opaque(store), make_keys(3)).all_ok

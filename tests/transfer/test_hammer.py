"""Everything at once, on a drive that does everything wrong: no wrong page, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.store.helpers import REPO

FAULTS = {"errno", "short", "corrupt", "misdirect", "delay", "hang"}


def hammered(tmp_path: Path, seconds: float, seed: int) -> dict[str, Any]:
    """What the hammer found, in a process of its own with Python's development mode: warnings of all kinds, and a debugging
    allocator that sees what is freed twice or written behind its end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.transfer.hammer", str(tmp_path / "s"), str(seconds), str(seed)],
        capture_output=True,
        text=True,
        timeout=seconds + 200,
        cwd=REPO,
        env={**os.environ, "PYTHONDEVMODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for sign in ("ResourceWarning", "Traceback", "Exception ignored", "Fatal Python error"):
        assert sign not in done.stderr, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    assert found["wrong"] == 0
    assert found["errors"] == []
    assert found["left"] == []
    assert found["reclaimed"] > 0
    assert {kind for kind, times in found["injected"].items() if times} == FAULTS
    assert found["outcomes"]["LOADED"] > 100


def test_eight_threads_leave_nothing_behind(tmp_path: Path) -> None:
    check(hammered(tmp_path, 8.0, seed=1))


@pytest.mark.slow
def test_eight_threads_leave_nothing_behind_after_a_minute(tmp_path: Path) -> None:
    check(hammered(tmp_path, 60.0, seed=2))

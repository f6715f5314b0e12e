"""`bench/hicache.py` with the smallest sizes: what it reports, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BACKENDS = ("gdsstore", "file", "nixl")
DIRECTORIES = ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR")

pytestmark = pytest.mark.slow


def start(directory: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "bench/hicache.py", "--tiny", "--directory", str(directory), *options]
    return subprocess.Popen(
        command,
        cwd=REPO,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        # A shell that has the tests in its background makes them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_it_reports_every_backend_and_leaves_nothing_behind(tmp_path: Path) -> None:
    drive, mine = tmp_path / "drive", tmp_path / "mine"
    mine.mkdir()
    bench = start(drive, "--json", "-", **dict.fromkeys(DIRECTORIES, str(mine)))
    out, err = bench.communicate(timeout=200)
    assert bench.returncode == 0, err
    result = json.loads(out)  # nothing else is on standard output
    left_out = result["peers_left_out"]
    assert all(isinstance(why, str) and why for why in left_out.values())
    expected = [name for name in BACKENDS if name not in left_out]
    assert {"gdsstore", "file"} <= set(expected)
    assert [(row["direction"], row["backend"]) for row in result["rows"]] == [
        (direction, name) for direction in ("save", "load") for name in expected
    ]
    for row in result["rows"]:
        assert (row["page_bytes"], row["rounds"]) == (262144, 1)
        assert min(row[name] for name in ("gbps", "ceiling_gbps", "ratio", "cpu_s_per_gb")) > 0
    assert [(row["backend"], row["pages"], row["keys"]) for row in result["lookups"]] == [
        (name, 256, 128) for name in expected
    ]
    files = {row["backend"]: row["files"] for row in result["lookups"]}
    assert files["file"] == 256
    assert files.get("nixl", 512) == 512  # K and V
    for row in result["lookups"]:
        assert row["exists_us"] > 0
        assert row["start_s"] > 0
    assert result["pool_huge_share"].keys() == {"262144"}
    assert any("page cache" in note for note in result["notes"])
    assert list(drive.iterdir()) == []
    assert (
        list(mine.iterdir()) == []
    )  # the shell's settings, which name a cache of the user's, are not followed


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    bench = start(tmp_path, "--quiet")
    until = time.monotonic() + 120
    while not any(tmp_path.glob("*/*/*")):  # in the middle of its work
        assert bench.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    for _ in range(40):  # one that comes while a finalizer runs is lost: Python only prints it
        bench.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            bench.communicate(timeout=3)
            break
    assert bench.returncode != 0
    assert list(tmp_path.iterdir()) == []

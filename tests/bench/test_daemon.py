"""`bench/daemon.py` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_source_has_a_row_and_nothing_is_left_on_the_drive(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "bench/daemon.py", "--tiny", "--directory", str(tmp_path), "--json", "-"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    found = json.loads(done.stdout)
    assert (found["schema"], found["schema_version"]) == ("gdsstore.bench.daemon", 1)
    assert found["lookups"]["count"] == found["parameters"]["lookups"]
    rows = {row["source"]: row for row in found["rows"]}
    assert set(rows) == {"drive", "shared memory"}
    for row in rows.values():
        assert row["meets"] == (row["ratio"] >= found["parameters"]["aim"])
        assert row["lookups"]["count"] > 0
        assert row["http"]["count"] > 0
    assert rows["drive"]["from_shared_memory"] == 0
    assert rows["shared memory"]["from_shared_memory"] > 0

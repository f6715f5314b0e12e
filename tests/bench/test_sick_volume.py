"""`bench/sick_volume.py` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_sickness_has_a_row_and_nothing_is_left_on_the_drive(tmp_path: Path) -> None:
    arguments = ["--seconds", "0.2", "--rounds", "1", "--directory", str(tmp_path), "--json", "-"]
    done = subprocess.run(
        [sys.executable, "bench/sick_volume.py", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    found = json.loads(done.stdout)
    assert (found["schema"], found["schema_version"]) == ("gdsstore.bench.sick_volume", 1)
    assert found["wrong_pages"] == 0
    rows = {row["sickness"]: row for row in found["rows"]}
    assert set(rows) == {"hangs", "errs", "crawls"}
    for row in rows.values():
        assert row["meets"] == (row["ratio"] >= found["parameters"]["aim"])
        outcomes = row["rounds"][0]["outcomes_well"]
        assert set(outcomes) <= {"LOADED", "MISS_DEADLINE"}  # late, where the machine itself has no time
        assert "LOADED" in outcomes
    assert rows["errs"]["opened_s"] > 0
    assert rows["crawls"]["opened_s"] is None

"""`bench/linker.py`: what it reports with the smallest sizes, and that a wrong page ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gdsstore.errors import GdsStoreError

REPO = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPO, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.slow
def test_it_reports_the_linker_and_its_peers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("bench/linker.py", "--tiny", "--json", "-", "--directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # nothing else is on standard output
    assert (result["schema"], result["schema_version"]) == ("gdsstore.bench.linker", 2)
    (row,), (beside,) = result["rows"], result["overlaps"]
    assert (row["pages"], row["rounds"]) == (4, 1)
    assert 0 < row["first_layer_s"] <= row["total_s"]
    assert min(row[name] for name in ("gbps", "ceiling_gbps", "ratio", "scheduler_us_per_page")) > 0
    assert min(row[name] for name in ("copy_s", "cpu_s_per_gb")) > 0
    assert row["copy_ratio"] > row["ratio"]
    assert row["queued_s"] >= 0
    assert beside["total_s"] >= beside["forward_s"] * 0.99
    assert [peer["backend"] for peer in result["peers"]] == ["gdsstore", "file"]
    assert list(tmp_path.iterdir()) == []


def test_without_sglang_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    hidden = (
        "import runpy, sys; sys.modules['sglang'] = None; sys.argv = sys.argv[1:]; sys.path[0] = 'bench'; "
    )
    run_it = hidden + "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run("-c", run_it, "bench/linker.py", "--json", "-", "--directory", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "sglang is not installed" in done.stderr


@pytest.mark.parametrize("what", ["wrong bytes", "not found", "not loaded"])
def test_a_page_that_is_missing_or_wrong_ends_the_bench(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    from linker_parts.rounds import measure

    counter = SimpleNamespace(set_consumer=lambda index: None, wait_until=lambda layer: None)
    linker = SimpleNamespace(
        lookup=lambda rid, transfers: [3 if what == "not found" else 4],
        load=lambda rid, transfers: True,
        start_layer_wise_loading=lambda: 0,
        finish_layer_wise_loading=lambda index: what != "not loaded",
        layer_done_counter=counter,
    )
    device: Any = SimpleNamespace(
        linker=linker,
        transfer=lambda names, place=None: [],
        blank=lambda: None,
        wrong=lambda keys, place: int(what == "wrong bytes"),
    )
    ceiling: Any = SimpleNamespace(run=lambda *_: 0.01)
    with pytest.raises(GdsStoreError):
        measure(
            device,
            np.zeros((4, 32), np.uint8),
            ceiling,
            lambda place: 0.01,
            [1.0],
            1,
            np.random.default_rng(1),
        )

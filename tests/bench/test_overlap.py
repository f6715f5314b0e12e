"""`bench/overlap.py` as a user runs it, on the simulated GPU where that can be had."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REPO = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "bench/overlap.py", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("drive")
    done = run("--tiny", "--json", "-", "--directory", str(directory))
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == [], "something was left on the drive"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_destination_has_a_row_for_each_size_or_a_reason(result: dict[str, Any]) -> None:
    parameters = result["parameters"]
    cells = {(pages, factor) for pages in parameters["pages"] for factor in parameters["factors"]}
    for destination in ("host", "device direct", "device bounce"):
        rows = [row for row in result["rows"] if row["destination"] == destination]
        assert {(row["pages"], row["factor"]) for row in rows} == cells or (
            destination != "host" and result["device_missing"]
        )
        for row in rows:
            assert 0 < row["first_group_s"] <= row["total_s"]
            assert len(row["ratios"]) == parameters["rounds"]
            assert row["meets"] == (np.median(row["ratios"]) <= result["limit"])


def test_the_result_has_a_version_and_says_which_gpu_it_was(result: dict[str, Any]) -> None:
    assert (result["schema"], result["schema_version"]) == ("gdsstore.bench.overlap", 1)
    assert result["gpu"]["kind"] in ("real", "simulated", "none")
    assert result["machine"]["facts"]["kernel"]["release"]


def test_a_forward_waits_for_its_layers_and_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    from overlap_parts.forward import Forward
    from overlap_parts.sizes import LAYOUT

    forward = Forward(2, 0.0001)
    start = time.perf_counter()
    ok = np.ones(2, np.bool_)
    forward.on_layers(0, 4, ok)
    time.sleep(0.02)  # longer than it takes for four layers: it has to wait here
    late = time.perf_counter()
    forward.on_layers(4, LAYOUT.layers, ok)
    assert forward.end() - start >= 4 * 0.0001
    assert forward.end() - late >= (LAYOUT.layers - 4) * 0.0001


def test_a_page_that_is_missing_or_wrong_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    from overlap_parts import rounds
    from overlap_parts.forward import Forward
    from overlap_parts.sizes import LAYOUT

    from gdsstore.errors import DeadlineError, GdsStoreError

    class Wrong:
        name = "host"

        def pages(self, count: int) -> None: ...
        def blank(self, count: int) -> None: ...
        def wrong(self, keys: object) -> int:
            return 1

    class Loads:
        def load(self, keys: object, pages: object) -> Any:
            return self

        def load_layers(self, keys: object, pages: object, on_layers: Any) -> Any:
            on_layers(0, LAYOUT.layers, np.ones(1, np.bool_))
            return self

        def result(self) -> Any:
            return self

        all_ok = True

    with pytest.raises(GdsStoreError, match="hold"):
        rounds.measure(Loads(), Wrong(), np.zeros((1, 32), np.uint8), (1.0,), 1)  # type: ignore[arg-type]
    forward = Forward(2, 0.0)
    forward.on_layers(0, LAYOUT.layers, np.array([True, False]))
    with pytest.raises(DeadlineError):
        forward.end()

"""`bench/gds_vs_bounce.py` as a user runs it, on the simulated GPU where that can be had."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG"
ENGINES = [
    *("kvikio direct", "nixl-gds-mt", "bounce (nixl)", "bounce (posix)", "kvikio compat", "nixl", "posix"),
    *("fio", "gdsio direct", "gdsio bounce"),
]


@dataclass
class Run:
    out: Path
    on_drive: Path
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "gds_vs_bounce.json").read_text())
        return found

    @property
    def report(self) -> str:
        return (self.out / "report.html").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    out, on_drive = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("drive")
    command = [sys.executable, "bench/gds_vs_bounce.py", "--quick", "--tiny", "--json", "-"]
    done = subprocess.run(
        [*command, "--out", str(out), "--path", str(on_drive)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Run(out, on_drive, done.stdout, done.stderr)


def test_every_contender_is_measured_in_every_cell_or_missing_with_a_reason(run: Run) -> None:
    rows, missing = run.result["rows"], run.result["missing"]
    cells = {(row["direction"], row["record_bytes"], row["submitters"]) for row in rows}
    assert len(cells) == 4
    for name in ENGINES:
        mine = [row for row in rows if row["contender"] == name]
        reasons = [each["reason"] for each in missing if each["contender"] == name]
        assert len(mine) == len(cells) or any(reasons), name
        for row in mine:
            assert row["gbps"] > 0
            assert row["latency_p99_us"] >= row["latency_p50_us"] > 0
            assert sum(row["paths"].values()) == pytest.approx(1, abs=0.001)
    assert {"posix"} <= {row["contender"] for row in rows}


def test_each_device_row_shows_the_path_that_was_counted(run: Run) -> None:
    if run.result["gpu"]["kind"] == "none":
        pytest.skip(run.result["gpu"]["why"])
    wanted = {"kvikio compat": {"compat": 1.0}, "bounce (posix)": {"bounce": 1.0}}
    if run.result["gpu"]["kind"] == "simulated":
        wanted["kvikio direct"] = {"direct": 1.0}
    for row in run.result["rows"]:
        assert row["paths"] == wanted.get(row["contender"], row["paths"])


def test_the_result_has_a_version_and_tells_of_the_machine(run: Run) -> None:
    result = run.result
    assert (result["schema"], result["schema_version"]) == ("gdsstore.bench.gds_vs_bounce", 1)
    assert result["machine"]["facts"]["kernel"]["release"]
    assert result["machine"]["facts"]["storage"]["fs_type"]
    assert result["date"][:2] == "20"
    assert len(result["verdicts"]) == 4
    assert bool(result["dram"]["counter"]) != bool(result["dram"]["missing"])


def test_json_on_standard_output_stands_alone_and_is_what_is_in_the_file(run: Run) -> None:
    assert json.loads(run.stdout) == run.result


def test_numbers_of_a_simulated_gpu_are_titled_as_such_everywhere(run: Run) -> None:
    kind, title = run.result["gpu"]["kind"], run.result["title"]
    assert title.startswith("SIMULATED GPU: says nothing about speed") == (kind == "simulated")
    assert title.startswith("NO GPU") == (kind == "none")
    assert f"<title>{title}</title>" in run.report
    assert f">{title}</h1>" in run.report


def test_the_report_needs_no_other_file_and_its_plots_lie_beside_it(run: Run) -> None:
    shown = re.findall(r'<img alt="([\w.]+)" src="data:image/png;base64,([^"]+)"', run.report)
    assert {name for name, _ in shown} >= {"throughput.png", "latency.png", "cpu.png", "verdicts.png"}
    for name, data in shown:
        assert base64.b64decode(data) == (run.out / name).read_bytes()
        assert base64.b64decode(data).startswith(PNG)
    assert not re.search(r'(src|href)="(?!data:)', run.report)


def test_nothing_is_left_on_the_drive(run: Run) -> None:
    assert list(run.on_drive.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install_before_it_measures(tmp_path: Path) -> None:
    hidden = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *more: None if name == 'matplotlib' else find(name, *more); "
        "sys.argv = sys.argv[1:]; sys.path[0] = 'bench'; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, "bench/gds_vs_bounce.py", "--quick", "--out", str(tmp_path / "out")],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0
    assert 'pip install "gdsstore[bench]"' in done.stderr
    assert list(tmp_path.iterdir()) == []

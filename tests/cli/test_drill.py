"""`gdsstore drill`: what it sees, what it calls a failure, and that it leaves nothing behind and touches no store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gdsstore.drill import plan as plans
from gdsstore.drill.plan import DrillFault
from gdsstore.drill.report import FaultReport
from gdsstore.drill.traffic import Seen
from tests.cli.command import LIGHT, filled_store, run, run_json
from tests.store.helpers import REPO

SHORT = ("--seconds", 0.3, "--quiet")


def drilled(directory: Path, *faults: str, exit_code: int = 0) -> dict[str, dict[str, Any]]:
    """The reports of a short drill, by fault."""
    options = [option for fault in faults for option in ("--fault", fault)]
    found = run_json("drill", "--directory", directory, *SHORT, *options, exit_code=exit_code)
    assert found["passed"] == (exit_code == 0)
    return {report["fault"]: report for report in found["faults"]}


def test_a_drive_that_errs_and_a_full_one_are_gone_through(tmp_path: Path) -> None:
    found = drilled(tmp_path, "errors", "full")
    for report in found.values():
        assert report["passed"], report["problems"]
        assert report["wrong_pages"] == report["late_calls"] == report["pages_lost"] == 0
        assert report["injected"] > 0
        assert report["pages_loaded"] > 0
    assert found["errors"]["left_alone_s"] > 0
    assert found["errors"]["back_s"] > 0
    assert found["errors"]["misses"].keys() <= {"MISS_IO", "MISS_VOLUME_SICK"}
    assert found["full"]["failed_saves"].keys() == {"FAILED_NO_SPACE"}
    assert found["full"]["misses"] == {}
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_costs_no_page_that_it_had_saved(tmp_path: Path) -> None:
    report = drilled(tmp_path, "kill")["kill"]
    assert report["injected"] == 3
    assert report["pages_saved"] > 0
    assert report["pages_loaded"] >= report["pages_saved"]
    assert report["pages_lost"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_all_faults_are_gone_through(tmp_path: Path) -> None:
    assert [*drilled(tmp_path)] == [fault.value for fault in DrillFault]


def test_wrong_bytes_are_seen_where_nobody_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIGHT, "GDSSTORE_VERIFY", "false")
    place, found = tmp_path / "drive", tmp_path / "found.json"
    place.mkdir()
    result = run("drill", "--directory", place, "--seconds", 0.3, "--fault", "corrupt", "--json", found)
    assert result.exit_code == 1
    assert "NO" in result.stdout
    assert "is `verify` switched off?" in result.stdout
    (report,) = json.loads(found.read_text())["faults"]
    assert not report["passed"]
    assert report["wrong_pages"] > 0
    assert list(place.iterdir()) == []


GOOD: dict[str, Any] = {"injected": 5, "left_alone_s": 0.1, "back_s": 0.1}


@pytest.mark.parametrize(
    ("fault", "facts", "what"),
    [
        (DrillFault.HANG, {"seen": Seen(wrong_pages=1)}, "wrong bytes"),
        (DrillFault.HANG, {"seen": Seen(late_calls=1)}, "after their deadline"),
        (DrillFault.HANG, {"seen": Seen(errors=["OSError: x"])}, "a call raised OSError"),
        (DrillFault.HANG, {"pages_lost": 1}, "are gone"),
        (DrillFault.KILL, {"pages_lost": 1}, "are gone"),
        (DrillFault.FULL, {"pages_lost": 1}, "are gone"),
        (DrillFault.HANG, {"injected": 0}, "nothing was tried"),
        (DrillFault.HANG, {"problems": ["the drive was still used"]}, "still used"),
    ],
)
def test_each_broken_promise_fails_a_drill(fault: DrillFault, facts: dict[str, Any], what: str) -> None:
    assert FaultReport(fault, **GOOD).passed
    report = FaultReport(fault, **{**GOOD, **facts})
    assert not report.passed
    assert what in " ".join(report.judge())


def test_pages_that_a_drive_destroyed_are_lost_and_no_failure() -> None:
    seen = Seen(misses=Counter(MISS_CHECKSUM=3))
    assert FaultReport(DrillFault.CORRUPT, seen=seen, pages_lost=3, injected=3).passed


@pytest.mark.parametrize("where", [".", "segments", "catalog"])
def test_a_store_s_directory_is_refused_and_not_touched(tmp_path: Path, where: str) -> None:
    store = filled_store(tmp_path / "s", 3)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    result = run("drill", "--directory", store / where, *SHORT)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "a store lies here" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_a_further_volume_of_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "volume.json").write_text("{}")
    assert "a store lies here" in run("drill", "--directory", tmp_path).stderr


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    result = run("drill", "--directory", tmp_path / "absent")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_drive_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "NEEDED_BYTES", 1 << 60)
    result = run("drill", "--directory", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "free space" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "fault"), [(signal.SIGINT, "hang"), (signal.SIGTERM, "kill")])
def test_an_interrupted_drill_leaves_nothing(tmp_path: Path, number: signal.Signals, fault: str) -> None:
    command = [sys.executable, "-m", "gdsstore.cli.main", "drill", "--directory", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--seconds", "300", "--fault", fault],
        cwd=REPO,
        env={**os.environ, **LIGHT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that has the tests in its background makes them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob(".gdsstore-drill-*/*/**/*.seg")):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []

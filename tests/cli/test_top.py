"""`gdsstore top` shows the daemon's status, or what the files tell, in a terminal of 80 x 24."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gdsstore.cli.top_frame import frame
from gdsstore.service.status import collect
from tests.cli.command import LIGHT, PAGE_BYTES, filled_store, run, run_json
from tests.service.serving import serving
from tests.store.helpers import REPO, load, make_keys, opaque, save, small_store


def lines(document: dict[str, Any], *older: dict[str, Any], problem: str | None = None) -> list[str]:
    """What a terminal of 80 x 24 shows."""
    console = Console(width=80, height=24, record=True, color_system=None, file=io.StringIO())
    console.print(frame(document, older, width=80, height=24, problem=problem))
    return console.export_text().splitlines()


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    with small_store(tmp_path / "s", host_cache="8MiB") as store:
        pages = opaque(store, PAGE_BYTES)
        save(pages, make_keys(20), PAGE_BYTES)
        load(pages, make_keys(25), PAGE_BYTES)
        return collect(store, {"pid": 7, "uptime_s": 90.0, "clients": 3, "leases": 17})


def process(pid: int, name: str) -> dict[str, Any]:
    moved = {"read_bytes": 9_990_000_000, "written_bytes": 123_000}
    return {"pid": pid, "name": name, **moved, "leases": 1024, "connected_s": 90.0}


def test_the_processes_are_told(document: dict[str, Any]) -> None:
    document["clients"] = [process(4711, "sglang::scheduler_TP0"), process(4712, "replay.py")]
    shown = lines(document)
    (row,) = (line for line in shown if "scheduler_TP0" in line)
    assert row.split() == ["4711", "sglang::scheduler_TP0", "9.99", "GB", "123", "kB", "1,024", "1.5", "min"]
    assert any("4712 replay.py" in line for line in shown)


def test_all_of_it_fits(document: dict[str, Any]) -> None:
    crowded = copy.deepcopy(document)
    crowded["drives"] *= 16
    crowded["clients"] = [process(7, "n" * 48)] * 100
    crowded["namespaces"] = {"count": 300, "rows": crowded["namespaces"]["rows"] * 100}
    error = {
        "time_s": 0.0,
        "level": "warning",
        "logger": "gdsstore",
        "message": "[red] " + "x" * 300,
        "count": 2,
    }
    crowded["errors"] = [error] * 50
    for each in (document, crowded):
        shown = lines(each)
        assert len(shown) <= 24
        assert max(map(len, shown)) <= 80
    text = "\n".join(lines(crowded))
    for word in (
        "throughput",
        "hit rate",
        "latency",
        "queue",
        "drive",
        "segments",
        "namespace",
        "process",
        "last errors",
    ):
        assert word in text
    assert "[red] xxx" in text  # as it is
    assert text.count("test ") >= 2  # a few namespaces
    assert text.count("xxxx") >= 2  # and a few errors


def test_a_frame_says_what_the_document_says(document: dict[str, Any]) -> None:
    text = "\n".join(lines(document))
    assert "live" in text
    assert "3 clients, 17 leases" in text
    assert "20 pages" in text
    assert "up 1.5 min" in text
    row = next(line for line in text.splitlines() if line.startswith("host "))
    assert row.split()[:4] == ["host", "-", "80%", "20"]  # no rate before a second look
    assert "write host" in text
    assert "healthy" in text


def test_rates_are_those_since_the_document_before(document: dict[str, Any]) -> None:
    later = copy.deepcopy(document)
    later["clock_s"] += 2.0
    later["throughput"][0]["bytes"] += 10_000_000
    later["tiers"][0]["hits"] += 5
    shown = lines(later, document)
    assert any("5.00 MB/s" in line for line in shown)
    row = next(line for line in shown if line.startswith("host "))
    assert row.split()[1] == "100%"


def test_another_run_of_the_daemon_gives_no_rates(document: dict[str, Any]) -> None:
    later = copy.deepcopy(document)
    later["clock_s"] += 2.0
    later["daemon"]["pid"] += 1
    later["throughput"][0]["bytes"] = 1
    row = next(line for line in lines(later, document) if line.startswith("write host"))
    assert row.split()[2] == "-"


def test_a_lost_daemon_is_said(document: dict[str, Any]) -> None:
    assert "daemon lost" in lines(document, problem="daemon lost")[0]


def test_without_a_daemon_it_shows_what_the_files_tell(tmp_path: Path) -> None:
    path = filled_store(tmp_path / "s")
    shown = run("top", "--store", path, "--once").stdout
    assert "no daemon" in shown
    assert "40 pages" in shown
    assert "2 sealed" in shown
    assert "\x1b" not in shown  # no terminal, no colours
    found = run_json("top", "--store", path)
    assert (found["version"], found["daemon"], found["store"]["pages"]) == (1, None, 40)


def test_where_the_output_is_no_terminal_it_shows_one_frame(tmp_path: Path) -> None:
    assert run("top", "--store", filled_store(tmp_path / "s")).stdout.count("throughput") == 1


def test_a_daemon_is_asked_over_http_with_its_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("right\n")
    with small_store(tmp_path / "s") as store:
        save(opaque(store), make_keys(7))
        with serving(store, token="right") as (url, _):
            found = run_json("top", "--url", url, "--token-file", token)
            assert (found["store"]["pages"], found["daemon"]["clients"]) == (7, 3)
            refused = run("top", "--url", url)
        gone = run("top", "--url", url)
    assert refused.exit_code == gone.exit_code == 2
    assert "--token-file" in refused.output
    assert "there is no daemon" in " ".join(gone.output.split())


def test_a_daemon_is_asked_over_its_socket_and_not_missed_when_it_was_killed(tmp_path: Path) -> None:
    path = filled_store(tmp_path / "s")
    command = [sys.executable, "-m", "gdsstore.cli.main", "serve", "--store", str(path), "--no-http"]
    environment = {**os.environ, **LIGHT}
    with subprocess.Popen(command, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stderr is not None
            assert any("serving" in line for line in daemon.stderr), "the daemon did not start"
            shown = run("top", "--store", path, "--once").stdout
            assert f"live, process {daemon.pid}" in shown
            assert "40 pages" in shown
        finally:
            daemon.kill()
    assert (path / "node.sock").exists()
    assert "no daemon" in run("top", "--store", path, "--once").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "either --store or --url"),
        (["--store", "s", "--url", "http://localhost"], "either --store or --url"),
        (["--store", "nowhere"], "there is no store here"),
        (["--url", "file:///etc/passwd"], "no address of a daemon"),
        (["--store", "s", "--token-file", "t"], "goes with --url"),
        (["--url", "http://localhost:1", "--token-file", "nowhere"], "token cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], says: str) -> None:
    result = run("top", *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())

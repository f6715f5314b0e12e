"""What holds for every command: errors are one line and exit code 2, results go where they were asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gdsstore
from tests.cli.command import filled_store, process, run

ON_A_STORE = ["inspect", "verify", "stats"]


def test_the_version_is_the_library_s() -> None:
    assert run("--version").stdout == f"gdsstore {gdsstore.__version__}\n"


@pytest.mark.parametrize("command", ["format", "replay", "bench", "inspect", "verify", "stats"])
def test_every_command_is_there_and_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("command", ON_A_STORE)
def test_a_path_without_a_store_is_one_line_and_makes_nothing(command: str, tmp_path: Path) -> None:
    result = run(command, "--store", tmp_path / "absent")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: there is no store here")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [*ON_A_STORE, "format"])
def test_a_path_that_is_a_file_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = run(command, "--store", tmp_path / "file")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "is a file" in result.stderr


@pytest.mark.parametrize("command", ON_A_STORE)
def test_a_damaged_store_json_is_one_line(command: str, tmp_path: Path) -> None:
    (filled_store(tmp_path / "s", 1) / "store.json").write_text("{")
    result = run(command, "--store", tmp_path / "s")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "store.json is damaged" in result.stderr


def test_an_error_of_the_system_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    done = process("stats", "--store", "/proc/self/mem/store")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ON_A_STORE)
def test_a_process_writes_json_alone_to_standard_output(command: str, tmp_path: Path) -> None:
    done = process(command, "--store", filled_store(tmp_path / "s"), "--json", "-")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == ""


@pytest.mark.parametrize("command", ON_A_STORE)
def test_quiet_says_nothing_and_a_json_file_gets_the_result(command: str, tmp_path: Path) -> None:
    result = run(command, "--store", filled_store(tmp_path / "s"), "--quiet", "--json", tmp_path / "r.json")
    assert (result.exit_code, result.output) == (0, "")
    assert isinstance(json.loads((tmp_path / "r.json").read_text()), dict)


def test_a_json_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = run("stats", "--store", filled_store(tmp_path / "s"), "--json", tmp_path / "absent" / "r.json")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "the folder of the JSON file is not there" in result.stderr


def test_the_library_s_warnings_are_seen_but_not_when_quiet(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    (store / "catalog" / "data.mdb").unlink()
    assert "catalog rebuilt" in run("stats", "--store", store).stderr
    (store / "catalog" / "data.mdb").unlink()
    assert run("stats", "--store", store, "--quiet").stderr == ""

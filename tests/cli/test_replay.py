import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdsstore.cli import replay as command
from gdsstore.cli.main import app
from gdsstore.replay.report import Report

TRACE = Path(__file__).parents[1] / "replay" / "data" / "conversation_400.jsonl.gz"
SMALL = ["--page-bytes", "16KiB", "--capacity", "64MiB", "--requests", "20"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_json_on_standard_output_stands_alone_and_the_temporary_store_is_gone(tmp_path: Path) -> None:
    result = run(str(TRACE), *SMALL, "--json", "-")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["wrong_pages"] == 0
    assert found["pages_loaded"] > 0
    assert found["requests"] == 20
    assert os.listdir(tmp_path) == []


def test_what_libraries_print_does_not_reach_standard_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = command.run_replay

    def noisy(*arguments: Any) -> Report:
        os.write(1, b"a word from some C library\n")
        return real(*arguments)

    monkeypatch.setattr(command, "run_replay", noisy)
    app(["replay", *SMALL, "--json", "-"], standalone_mode=False)
    out, err = capfd.readouterr()
    assert json.loads(out)["wrong_pages"] == 0
    assert "a word from some C library" in err


def test_a_result_goes_to_a_file_beside_the_table(tmp_path: Path) -> None:
    result = run(*SMALL, "--json", "result.json", "--store", "kept")
    assert result.exit_code == 0, result.stderr
    assert "pages wrong" in result.stdout
    assert json.loads((tmp_path / "result.json").read_text())["wrong_pages"] == 0
    assert (tmp_path / "kept" / "store.json").exists()


def test_quiet_says_nothing() -> None:
    result = run(*SMALL, "--quiet")
    assert (result.exit_code, result.stdout) == (0, "")


def test_a_wrong_page_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDSSTORE_VERIFY", "false")
    assert run(*SMALL, "--faults", "corrupt:1.0", "--quiet").exit_code == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["absent-trace"],
        ["--page-bytes", "4G"],
        ["--capacity", "many"],
        ["--processes", "0"],
        ["--faults", "what:1"],
        ["--json", "absent/result.json", *SMALL],
    ],
)
def test_what_cannot_run_is_exit_code_2_with_one_line_and_leaves_nothing(
    wrong: list[str], tmp_path: Path
) -> None:
    result = run(*wrong)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == []

"""`gdsstore replay --timed` as a user calls it."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gdsstore.cli.main import app

TRACE = Path(__file__).parent / "data" / "conversation_400.jsonl.gz"
SMALL = ["--page-bytes", "16KiB", "--capacity", "64MiB", "--requests", "8"]
TIMED = [*SMALL, "--timed", "--seconds", "0.1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GDSSTORE_ENGINE", "posix")
    monkeypatch.setenv("GDSSTORE_HOST_CACHE", "16MiB")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_a_table_of_all_variants_and_the_same_as_json(tmp_path: Path) -> None:
    result = run(str(TRACE), *TIMED, "--throttle", "200", "--json", "result.json")
    assert result.exit_code == 0, result.stderr
    for variant in ("no store", "store", "prefetch", "prefetch, cost model"):
        assert variant in result.stdout
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["throttle_mbps"], found["requests"]) == (200.0, 8)
    assert [each["wrong_pages"] for each in found["variants"]] == [0, 0, 0, 0]
    assert os.listdir(tmp_path) == ["result.json"]


def test_rates_that_were_given_are_used(tmp_path: Path) -> None:
    result = run(str(TRACE), *TIMED, "--scale", "400", "--prefill-rate", "1e6", "--json", "-")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["scale"], found["prefill_tokens_s"]) == (400.0, 1e6)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--seconds", "5"],
        ["--throttle", "50"],
        ["--scale", "2"],
        ["--prefill-rate", "1000"],
        ["--plot", "plot.png"],
        ["--timed", "--processes", "2"],
        ["--timed", "--faults", "errno:0.1"],
        ["--timed", "--throttle", "0"],
        ["--timed", "--seconds", "-1"],
    ],
)
def test_options_that_do_not_go_together_are_exit_code_2_with_one_line(
    wrong: list[str], tmp_path: Path
) -> None:
    result = run(str(TRACE), *SMALL, *wrong)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert os.listdir(tmp_path) == []


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run(str(TRACE), *TIMED, "--plot", "plot.png")
    assert result.exit_code == 2
    assert 'pip install "gdsstore[bench]"' in result.stderr


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(str(TRACE), *TIMED, "--plot", "plot.png", "--quiet")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", ["absent/plot.png", "plot.what"])
def test_a_plot_that_cannot_be_written_is_exit_code_2(path: str) -> None:
    pytest.importorskip("matplotlib")
    result = run(str(TRACE), *TIMED, "--plot", path)
    assert result.exit_code == 2
    assert "plot" in result.stderr

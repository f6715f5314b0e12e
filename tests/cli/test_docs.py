"""docs/cli.md knows every command, every option and every field of the results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gdsstore.cli.main import app
from tests.cli.command import filled_store, run_json
from tests.store.helpers import REPO

TEXT = (REPO / "docs" / "cli.md").read_text(encoding="utf-8")
COMMON = {"--store", "--json", "--quiet", "--help", "-h"}


def section(name: str) -> str:
    match = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None, f"docs/cli.md has no section for {name}"
    return match[1]


def leaves(command: Any) -> Iterator[Any]:
    children = getattr(command, "commands", None)
    if children is None:
        yield command
    else:
        for child in children.values():
            yield from leaves(child)


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))  # type: ignore[attr-defined]
def test_every_option_of_a_command_is_in_its_section(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = {
        flag for leaf in leaves(command) for each in leaf.params for flag in each.opts if flag[0] == "-"
    }
    assert {flag for flag in options - COMMON if f"`{flag}" not in section(name)} == set()
    shown = set(re.findall(r"`(--[a-z-]+)", section(name)))
    assert shown <= options, "the page shows options that the command does not have"


@pytest.mark.parametrize("name", ["format", "inspect", "verify"])
def test_every_field_of_a_result_is_in_its_section(name: str, tmp_path: Path) -> None:
    arguments = ["--segments"] if name == "inspect" else []
    found = run_json(name, "--store", filled_store(tmp_path / "s", 1), *arguments)
    assert {field for field in found if f"`{field}`" not in section(name)} == set()

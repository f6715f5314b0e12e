"""What the pages link to is there, and the commands that the README shows exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_shows_the_commands_that_there_are() -> None:
    from gdsstore.cli.main import app

    shown = {
        tuple(words.split())
        for words in re.findall(r"^\| `gdsstore ([a-z ]+)", (ROOT / "README.md").read_text(), re.M)
    }
    assert shown == set(commands(typer.main.get_command(app), ()))


def commands(command: object, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    children = getattr(command, "commands", None)
    if children is None:
        return [path]
    return [leaf for name, child in children.items() for leaf in commands(child, (*path, name))]


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh"])
def test_the_scripts_of_the_quickstart_can_be_run(script: str) -> None:
    assert f"./{script}" in (ROOT / "README.md").read_text()
    assert (ROOT / script).stat().st_mode & 0o111

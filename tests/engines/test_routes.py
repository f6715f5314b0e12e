"""What path and strict come to on every kind of machine: the table of docs/paths.md, row by row."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path as FilePath

import pytest

from gdsstore.engines.paths import Path
from gdsstore.engines.routes import (
    NOT_TRIED,
    PathSetting,
    Side,
    check,
    choose,
    needs_bounce,
    needs_cufile,
)
from gdsstore.errors import ConfigError, EngineError, MissingExtraError

ROOT = FilePath(__file__).parents[2]
HEAD = "| `path` | `strict` | cuFile | bounce | what happens |\n"
VALUES = (list(PathSetting), ["false", "true"], ["direct", "compat", "none"], ["yes", "no"])
NO_CUFILE = "why cuFile is not there"
ONLY_COMPAT = "why cuFile is not direct"
NO_BOUNCE = "why bounce is not there"

Case = tuple[str, str, str, str]


def table() -> list[tuple[Case, str]]:
    """Case and outcome, each row that says "any" as all that it stands for."""
    lines = (ROOT / "docs" / "paths.md").read_text().split(HEAD, 1)[1].splitlines()[1:]
    found: list[tuple[Case, str]] = []
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        *case, outcome = (cell.strip() for cell in line.strip("|").split("|"))
        every = [VALUES[at] if cell == "any" else [cell] for at, cell in enumerate(case)]
        found += [(each, outcome) for each in itertools.product(*every)]  # type: ignore[misc]
    return found


def sides(case: Case) -> tuple[Side, Side]:
    cufile = {
        "direct": Side(Path.DIRECT),
        "compat": Side(Path.COMPAT, ONLY_COMPAT),
        "none": Side(None, NO_CUFILE),
    }[case[2]]
    return cufile, Side(Path.BOUNCE) if case[3] == "yes" else Side(None, NO_BOUNCE)


def outcome_of(case: Case, cufile: Side, bounce: Side) -> str:
    try:
        paths = choose(PathSetting(case[0]), case[1] == "true", cufile, bounce).paths
    except (ConfigError, EngineError) as error:
        return type(error).__name__
    return " or ".join(paths) + (", by measurement" if len(paths) > 1 else "")


def test_the_table_has_every_combination_once() -> None:
    assert sorted(case for case, _ in table()) == sorted(itertools.product(*VALUES))


@pytest.mark.parametrize(
    ("case", "outcome"), table(), ids=lambda each: "-".join(each) if len(each) == 4 else ""
)
def test_what_happens_is_what_the_table_says(case: Case, outcome: str) -> None:
    assert outcome_of(case, *sides(case)) == outcome


@pytest.mark.parametrize("case", list(itertools.product(*VALUES)), ids="-".join)
def test_a_side_that_need_not_be_tried_changes_nothing(case: Case) -> None:
    setting, strict = PathSetting(case[0]), case[1] == "true"
    cufile, bounce = sides(case)
    tried = cufile if needs_cufile(setting) else NOT_TRIED
    needed = bounce if needs_bounce(setting, strict, tried) else NOT_TRIED
    assert outcome_of(case, tried, needed) == outcome_of(case, cufile, bounce)


@pytest.mark.parametrize(
    "case", [case for case, outcome in table() if outcome == "EngineError"], ids="-".join
)
def test_a_refusal_says_why_and_what_to_do(case: Case) -> None:
    cufile, bounce = sides(case)
    with pytest.raises(EngineError) as refusal:
        choose(PathSetting(case[0]), case[1] == "true", cufile, bounce)
    text = str(refusal.value)
    assert (bounce if case[0] == "bounce" else cufile).reason in text
    assert "doctor" in text or "set path" in text


def test_a_missing_package_is_named_with_its_pip_install() -> None:
    cufile = Side.missing(MissingExtraError("kvikio", "cuda13", "the kvikio engine"))
    with pytest.raises(EngineError, match=re.escape('pip install "gdsstore[cuda13]"')):
        choose(PathSetting.AUTO, True, cufile, NOT_TRIED)


@pytest.mark.parametrize(
    "case", [case for case, outcome in table() if outcome == "ConfigError"], ids="-".join
)
def test_a_contradiction_is_refused_before_anything_is_tried(case: Case) -> None:
    with pytest.raises(ConfigError, match="change one of the two"):
        check(PathSetting(case[0]), case[1] == "true")


def test_the_settings_are_read_without_numpy() -> None:
    script = (
        "import sys, types\n"
        f"package = types.ModuleType('gdsstore'); package.__path__ = [{str(ROOT / 'gdsstore')!r}]\n"
        "sys.modules['gdsstore'] = package\n"
        "import gdsstore.engines.routes\n"
        "print('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"

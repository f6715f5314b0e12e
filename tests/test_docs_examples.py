"""The Python examples of README.md and docs/api.md run as they stand, in order, one namespace a file."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gdsstore

ROOT = Path(__file__).resolve().parent.parent
FILES = ("README.md", "docs/api.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    file: str
    line: int
    code: str


def examples(file: str) -> list[Example]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return [
        Example(file, text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)
    ]


EXAMPLES = [example for file in FILES for example in examples(file)]


@pytest.mark.parametrize("file", FILES)
def test_the_examples_run_and_what_they_assert_holds(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the processes that an example starts
    namespace: dict[str, Any] = {"__name__": "__example__"}
    for example in examples(file):
        # The line numbers of a traceback are then those of the page.
        code = compile("\n" * (example.line - 1) + example.code, str(ROOT / file), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.file}:{example.line}")
def test_an_example_asserts_something(example: Example) -> None:
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(example.code)))


@pytest.mark.parametrize("file", FILES)
def test_a_page_has_examples(file: str) -> None:
    assert examples(file)


def test_the_api_page_names_everything_that_is_public() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert {name for name in gdsstore.__all__ if name not in words} == set()


def test_the_api_page_explains_every_status() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert explained == [status.name for status in gdsstore.PageStatus if status.name != "PENDING"]

"""Promises that hold for the whole package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gdsstore

SOURCES = sorted(Path(gdsstore.__file__).parent.rglob("*.py"))
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}


def imports(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_nothing_unpickles_and_nothing_evaluates(source: Path) -> None:
    assert not imports(source) & UNSAFE
    text = source.read_text()
    assert "allow_pickle=True" not in text
    assert "torch.load" not in text
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert not {"eval", "exec"} & set(calls)


OF_STORES = [source for source in SOURCES if "bench" not in source.parts]  # benches write files of their own


@pytest.mark.parametrize("source", OF_STORES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_files_of_a_store_are_opened_without_following_links(source: Path) -> None:
    """Every os.open that could create or write says O_NOFOLLOW and O_CLOEXEC, in the call or in a name beside it."""
    text = source.read_text()
    if "os.open(" in text and ("O_RDWR" in text or "O_CREAT" in text or "O_WRONLY" in text):
        assert text.count("O_NOFOLLOW") >= 1
        assert text.count("O_CLOEXEC") >= 1


def test_nothing_of_sglang_is_imported() -> None:
    assert [source for source in SOURCES if "sglang" in imports(source)] == []

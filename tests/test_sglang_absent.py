"""Where SGLang is not installed, the folder of its tests leaves the process that all tests share as it is."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

CONFTEST = Path(__file__).parent / "sglang_cpu" / "conftest.py"


class Recorder:
    """Stands in for `pytest.Config` and notes what is asked of it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def addinivalue_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))


@pytest.fixture
def conftest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The conftest of that folder, as it is loaded without SGLang."""
    spec = importlib.util.spec_from_file_location("conftest_without_sglang", CONFTEST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    before = process_state()
    spec.loader.exec_module(module)
    assert process_state() == before
    return module


def process_state() -> list[object]:
    return [dict(os.environ), list(sys.path), list(sys.meta_path), set(sys.modules)]


def test_it_collects_no_tests_and_changes_no_settings(conftest: ModuleType) -> None:
    assert conftest.collect_ignore == ["tests"]
    assert {path.parent.name for path in CONFTEST.parent.rglob("test_*.py")} == {"tests"}
    config = Recorder()
    conftest.pytest_configure(config)
    assert config.lines == []

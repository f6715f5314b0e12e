"""A folder that tests fill like the /proc and /sys of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.probe.tree_builder import TreeBuilder


@pytest.fixture
def built(tmp_path: Path) -> TreeBuilder:
    return TreeBuilder(tmp_path)

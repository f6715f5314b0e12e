"""The simulated GPU, and a file, for the engines that move device memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsstore.engines.base import Engine
from tests.cudasim.fixtures import gpu, simulator  # noqa: F401
from tests.engines.bounce_rig import opened  # noqa: F401
from tests.engines.rig import BLOCK, Bytes, open_file, random_bytes


@pytest.fixture
def content() -> Bytes:
    """16 blocks."""
    return random_bytes(16 * BLOCK, 7)


@pytest.fixture
def fd(engine: Engine, tmp_path: Path, content: Bytes) -> Iterator[int]:
    """A file with that content, attached to the module's `engine`."""
    fd = open_file(tmp_path / "file", len(content), content=content)
    engine.attach(fd, len(content))
    yield fd
    engine.detach(fd)
    os.close(fd)

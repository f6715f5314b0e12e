"""What the tests of the simulated GPU share."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.cudasim.fixtures import gpu, kvikio, nixl, simulator  # noqa: F401

MiB = 1 << 20


@pytest.fixture(scope="module")
def data() -> bytes:
    """8 MiB that repeat nowhere."""
    return random.Random(1).randbytes(8 * MiB)


@pytest.fixture
def data_file(data: bytes, tmp_path: Path) -> Path:
    """A file with data, not in dirty pages: O_DIRECT reads of those are slow."""
    path = tmp_path / "data"
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path

"""One zygote for all tests here, and one seed that a failure prints."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


@pytest.fixture
def seed() -> int:
    """New each time; a failing test prints it with its captured output, and CRASH_SEED brings it back."""
    number = int(os.environ.get("CRASH_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"CRASH_SEED={number}")
    return number


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for one store and its journal; removed after a test that passed, since they are large together."""
    yield tmp_path
    shutil.rmtree(tmp_path / "store", ignore_errors=True)

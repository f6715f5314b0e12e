"""Pytest fixtures that load the simulated GPU and what runs on it, or skip with the reason.

For tests in a process of their own, before kvikio or nixl are imported. A conftest.py takes them over by importing them.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.cudasim import simgpu

HOW = "python -m pip install --no-deps -r tests/cudasim/requirements.txt"


def why_not(*packages: str) -> str | None:
    """Why the simulated GPU, or one of the packages that are to run on it, cannot be had here; None where they can."""
    if not shutil.which("make") or not shutil.which("gcc"):
        return "the simulated GPU needs make and gcc"
    for package in ("nvidia.cu13", *packages):
        if not _is_installed(package):
            return f"needs the package {package}: {HOW}"
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def need(*packages: str) -> None:
    """Skip the test unless the simulated GPU and the packages are here."""
    reason = why_not(*packages)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def simulator() -> ModuleType:
    """simgpu, loaded."""
    need()
    simgpu.load()
    return simgpu


@pytest.fixture
def gpu(simulator: ModuleType) -> Iterator[ModuleType]:
    """simgpu with no faults armed, counters at zero and device 0 current."""

    def reset() -> None:
        simgpu.cuda_faults("")
        simgpu.cufile_faults("")
        simgpu.reset_stats()

    simgpu.use(0)
    reset()
    yield simgpu
    reset()


@pytest.fixture(scope="session")
def kvikio(simulator: ModuleType) -> ModuleType:
    need("kvikio")
    module = importlib.import_module("kvikio")
    for part in ("cufile_driver", "defaults"):
        importlib.import_module(f"kvikio.{part}")
    return module


@pytest.fixture(scope="session")
def nixl(simulator: ModuleType) -> ModuleType:
    need("nixl", "nixl_cu13")
    module = importlib.import_module("nixl")
    if "nixl_cu13" not in sys.modules:
        pytest.skip("nixl chose another CUDA version's build; the simulated runtime is libcudart.so.13")
    return module

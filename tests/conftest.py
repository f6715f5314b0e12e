"""What holds for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.cudasim.own_process import (  # noqa: F401
    pytest_configure,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
)

# Settings in the shell that runs the tests must not change what they see, nor what the processes that they start see.
for _name in [name for name in os.environ if name.startswith("GDSSTORE_")]:
    del os.environ[_name]

# Workers, and the processes that they start, share the cores: threads of PyTorch's in each would burn them waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The first example may compile a numba kernel, and other work on the machine stretches any of them: no time limit an example.
settings.register_profile("gdsstore", deadline=None)
settings.load_profile("gdsstore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first: xdist hands out whole files, in this order, and short ones at the end keep all workers busy."""
    long = {item.path for item in items for name in ("slow", "crash") if item.get_closest_marker(name)}
    items.sort(key=lambda item: item.path not in long)

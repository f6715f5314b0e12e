"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

from tests.cudasim.own_process import (  # noqa: F401
    pytest_configure,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
)

# Settings in the shell that runs the tests must not change what they see, nor what the processes that they start see.
for _name in [name for name in os.environ if name.startswith("GDSSTORE_")]:
    del os.environ[_name]

# The first example may compile a numba kernel, and other work on the machine stretches any of them: no time limit an example.
settings.register_profile("gdsstore", deadline=None)
settings.load_profile("gdsstore")

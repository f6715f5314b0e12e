"""Real SGLang servers on the CPU with this backend. Uses the harness in tests/sglang_cpu; without SGLang does nothing at all."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from server import ServerClient

HAS_SGLANG = importlib.util.find_spec("sglang") is not None

if HAS_SGLANG:
    # With importlib as import mode pytest puts no folder on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sglang_cpu"))

    import harness_env

    harness_env.prepare_this_process()
else:
    # The tests of the other folders share this process and must see it as it is.
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def memory_server() -> Iterator[ServerClient]:
    """A server with a host tier and no storage, for cold answers and for tests that attach a store while it runs.

    Whoever attaches one detaches it. Computes in float32, as the servers whose answers are compared with its own.
    """
    from server import StorageOptions

    from tests.sglang_server.launch import FLOAT32, backend_environment
    from tests.sglang_server.processes import throwaway_server

    with throwaway_server(storage=StorageOptions(), extra_args=FLOAT32, env=backend_environment()) as server:
        yield server

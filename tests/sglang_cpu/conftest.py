"""Prepares the test process for SGLang on the CPU before a test module imports it. Without SGLang does nothing at all."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_SGLANG = importlib.util.find_spec("sglang") is not None

if HAS_SGLANG:
    # With importlib as import mode pytest puts no folder on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parent))

    import harness_env

    harness_env.prepare_this_process()
else:
    # The tests of the other folders share this process and must see it as it is.
    collect_ignore = ["tests"]


def pytest_configure(config: pytest.Config) -> None:
    if not HAS_SGLANG:
        return
    # SGLang's own imports warn; the warnings of interest are those of the code under test.
    for module in ("sglang", "torch", "transformers", "tvm_ffi"):
        config.addinivalue_line("filterwarnings", f"ignore::Warning:{module}.*")


@pytest.fixture(scope="session", autouse=True)
def cpu_shim() -> None:
    import hicache_cpu_shim

    hicache_cpu_shim.install()


@pytest.fixture(scope="module", autouse=True)
def server_arguments_are_restored() -> Iterator[None]:
    from server_state import server_arguments_kept

    with server_arguments_kept():
        yield

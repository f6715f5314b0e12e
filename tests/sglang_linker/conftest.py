"""Prepares the test process for SGLang on the CPU, as tests/sglang_cpu does. Without SGLang does nothing at all."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_SGLANG = importlib.util.find_spec("sglang") is not None

if HAS_SGLANG:
    # With importlib as import mode pytest puts no folder on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sglang_cpu"))

    import harness_env

    harness_env.prepare_this_process()
else:
    # The tests of the other folders share this process and must see it as it is.
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if not HAS_SGLANG:
        return
    # SGLang's own imports warn; the warnings of interest are those of the code under test.
    for module in ("sglang", "torch", "transformers", "tvm_ffi"):
        config.addinivalue_line("filterwarnings", f"ignore::Warning:{module}.*")


@pytest.fixture(scope="session", autouse=True)
def cpu_shim() -> None:
    if HAS_SGLANG:  # the tests on the simulated GPU do without
        import hicache_cpu_shim

        hicache_cpu_shim.install()


@pytest.fixture(scope="module", autouse=True)
def server_arguments_are_restored() -> Iterator[None]:
    if not HAS_SGLANG:
        yield
        return
    from server_state import server_arguments_kept

    with server_arguments_kept():
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After each test: no open store, no thread of the linker's. unittest's cleanups have run by then."""
    from sglang_backend import stores

    yield
    assert not stores._open, "a store was left open"
    left: list[str] = []
    for _ in range(6000):  # one that has been told to end may need a processor for that
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("gdsstore-")]
        if not left:
            break
        time.sleep(0.01)
    assert not left, "threads were left"

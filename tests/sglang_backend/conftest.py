"""Prepares the test process for SGLang on the CPU, as tests/sglang_cpu does. Without SGLang does nothing at all."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

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


class Attach(Protocol):
    def __call__(
        self, *pools: Any, folder: str = ..., facts: dict[str, Any] | None = ..., **settings: Any
    ) -> Any: ...


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


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """Makes backends as SGLang attaches them: `attach(kv_pool, ("swa", pool), ..., folder="store", facts={...}, **settings)`.

    Without pools only the object is made. Backends on one folder share the store. All are closed at the end of the test.
    """
    from sglang_backend import stores
    from tests.sglang_backend.backends import make_backend

    before = set(stores._open)
    with contextlib.ExitStack() as closing:

        def attach(
            *pools: Any, folder: str = "store", facts: dict[str, Any] | None = None, **settings: Any
        ) -> Any:
            backend = make_backend(tmp_path / folder, pools, facts or {}, settings)
            closing.callback(backend.close)
            return backend

        yield attach
    assert set(stores._open) == before, "a store was left open"

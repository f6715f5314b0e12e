"""The Triton kernel equals the host and the reference, is refused what it cannot do, and compiles for a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("triton_checks.py")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton")),
    reason="needs torch and triton",
)


def check(*names: str, cache: Path, interpret: bool = False) -> None:
    """Run some of triton_checks.py's functions in a new process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["TRITON_CACHE_DIR"] = str(cache)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    result = subprocess.run(
        [sys.executable, str(CHECKS), *names], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_the_kernel_in_the_interpreter_matches_host_and_reference(tmp_path: Path) -> None:
    check("equal", "shapes", "refused", cache=tmp_path, interpret=True)


def test_host_memory_is_refused_where_triton_does_not_interpret(tmp_path: Path) -> None:
    check("host_memory_without_interpreter", cache=tmp_path)


def test_triton_is_imported_late_and_its_absence_names_the_extra(tmp_path: Path) -> None:
    check("lazy_and_missing", cache=tmp_path)


def test_the_kernel_compiles_to_machine_code_without_a_gpu(tmp_path: Path) -> None:
    check("compiled", cache=tmp_path)

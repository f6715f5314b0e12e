"""Many threads on the simulated libraries, as built for tests and under ThreadSanitizer."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cudasim import simgpu
from tests.cudasim.fixtures import need

ROOT = Path(__file__).resolve().parents[1]


def build_and_run(libraries: Path, folder: Path, flags: list[str], env: dict[str, str]) -> None:
    include = Path(importlib.import_module("nvidia.cu13").__path__[0], "include")
    program = folder / "stress"
    command = [
        "gcc",
        *flags,
        "-g",
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
    ]
    command += ["-isystem", str(include), "-o", str(program), str(ROOT / "tests" / "stress.c")]
    command += [str(libraries / "libcuda.so.1"), str(libraries / "libcufile.so.0")]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run(
        [program, folder / "file"],
        env={**os.environ, **env, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture
def tools() -> None:
    need()


def test_threads_read_the_right_bytes(tools: None, tmp_path: Path) -> None:
    build_and_run(simgpu.build(), tmp_path, ["-O2"], {})


def test_there_are_no_data_races(tools: None, tmp_path: Path) -> None:
    sanitizer = "-fsanitize=thread"
    probe = subprocess.run(
        ["gcc", sanitizer, "-x", "c", "-o", tmp_path / "probe", "-"],
        input="int main(void){return 0;}",
        text=True,
    )
    if probe.returncode or subprocess.run([tmp_path / "probe"]).returncode:
        pytest.skip("ThreadSanitizer does not work here")
    command = ["make", "-s", "-C", str(ROOT), f"PYTHON={sys.executable}", f"OUT={tmp_path}"]
    subprocess.run([*command, f"CFLAGS=-O1 -g {sanitizer}"], check=True, timeout=120)
    # It reserves the addresses that simulated devices usually have.
    build_and_run(
        tmp_path, tmp_path, ["-O1", sanitizer], {"CUDASIM_VA_BASE": "0", "TSAN_OPTIONS": "exitcode=66"}
    )

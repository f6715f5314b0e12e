"""Which GPU there is to measure: a real one, or the simulated one of the tests, or none."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice

SIMULATOR = Path("tests/cudasim")  # in the repository
# Simulated memory costs something only once it is touched.
SIMULATOR_ENVIRONMENT = {"CUDASIM_MEM_MB": "65536"}

Kind = Literal["real", "simulated", "none"]


@dataclass(frozen=True, slots=True)
class Gpu:
    kind: Kind
    why: str  # why not the better thing; "" for a real one


def real_gpu() -> Gpu:
    try:
        CudaDevice(0).close()
    except DeviceError as error:
        return Gpu("none", f"no GPU: {error}")
    return Gpu("real", "")


def has_simulator(root: Path) -> bool:
    return (root / SIMULATOR / "simgpu.py").exists()


def start_again_simulated(command: list[str]) -> None:
    """This process becomes one that loads the simulated libraries before anything else can load the real ones.

    `command`: of Python, for that. Does not return.
    """
    os.execve(sys.executable, [sys.executable, *command], {**os.environ, **SIMULATOR_ENVIRONMENT})


def simulated_gpu() -> Gpu:
    """Load the simulated GPU, or say why it cannot be had. Before kvikio and nixl are imported."""
    from tests.cudasim import simgpu

    try:
        simgpu.load()
    except (simgpu.BuildError, simgpu.SimError, OSError) as error:
        return Gpu("none", f"no GPU, and the simulated one does not start: {' '.join(str(error).split())}")
    return Gpu("simulated", "no GPU here, so the simulated one of tests/cudasim")

"""Whether the tests of a real GPU can run here, and where their memory comes from."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gdsstore.memory.cuda import load_driver
from gdsstore.probe.cufile import cufile
from gdsstore.probe.tree import LIVE, Tree
from tests.cudasim import fixtures

# The simulated GPU, on which the same tests run as far as they can.
SIMULATED = pytest.mark.own_process(CUDASIM_POISON=0xEE, NIXL_LOG_LEVEL="FATAL")


REAL = pytest.mark.gpu
PLACES = [pytest.param("real", marks=REAL), pytest.param("simulated", marks=SIMULATED)]


@functools.cache
def why_no_gpu() -> str | None:
    """Why CUDA has no GPU to offer here; None where it has one. Makes no context."""
    driver = load_driver()
    count = ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "needs an NVIDIA GPU, and CUDA offers none here"
    return None


@functools.cache
def why_no_cufile() -> str | None:
    """Why nobody should call cuFile here: on some machines it never returns."""
    driver = cufile(Tree(LIVE), os.environ, ask_driver=True).driver
    return driver.error if driver is not None and driver.hung else None


def need(where: str, *packages: str) -> None:
    """Skip the test unless the GPU ("real" or "simulated") and the packages are here."""
    if where == "simulated":
        fixtures.need(*packages, *(["nixl_cu13"] if "nixl" in packages else []))
        return
    reason = why_no_gpu()
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if reason is None and "torch" in packages and not missing and not _cuda_torch():
        missing = ["torch, built for CUDA"]
    if reason is None and missing:
        reason = f"needs {', '.join(missing)}"
    if reason is not None:
        pytest.skip(reason)


def _cuda_torch() -> bool:
    import torch

    return torch.cuda.is_available()


class Bytes:
    """`nbytes` bytes of device memory of somebody's; `owner` keeps them alive."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner, self.address, self.nbytes = owner, address, nbytes


@contextmanager
def memory_of(kind: str, nbytes: int) -> Iterator[Bytes]:
    """Device memory by "torch", "cupy" or the simulator ("simgpu"), as their users get it."""
    match kind:
        case "torch":
            import torch

            tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
            torch.cuda.synchronize()
            yield Bytes(tensor, tensor.data_ptr(), nbytes)
        case "cupy":
            import cupy

            with cupy.cuda.Device(0):
                array = cupy.zeros(nbytes, cupy.uint8)
                cupy.cuda.get_current_stream().synchronize()
            yield Bytes(array, int(array.data.ptr), nbytes)
        case "simgpu":
            from tests.cudasim import simgpu

            buffer = simgpu.DeviceBuffer(nbytes)
            buffer.put(bytes(nbytes))
            yield Bytes(buffer, buffer.ptr, nbytes)
            buffer.free()
        case _:
            raise ValueError(kind)

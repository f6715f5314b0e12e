"""Both kinds of page kernels on the simulated GPU. A test module takes the fixtures over by importing them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gdsstore.memory.cuda import CudaDevice
from gdsstore.transfer.scatter import CopyKernels, PageKernels, TritonKernels
from tests.cudasim.fixtures import gpu, simulator  # noqa: F401
from tests.transfer.scatter_model import BLOCK, BYTES, SOON_S, Image

KINDS = {"triton": TritonKernels, "copies": CopyKernels}


def kinds(**environment: Any) -> list[Any]:
    """Parameters for `kind`. Triton's interpreter needs device memory that the host can touch, and a process of its own."""
    environment = {"CUDASIM_POISON": 0xEE, **environment}
    interpreted = {"CUDASIM_HOST_VISIBLE": 1, "TRITON_INTERPRET": 1, **environment}
    return [
        pytest.param("triton", marks=pytest.mark.own_process(**interpreted)),
        pytest.param("copies", marks=pytest.mark.own_process(**environment)),
    ]


class SimulatedMemory:
    """BYTES bytes for a test, and as many at `spare` to copy over them."""

    def __init__(self, simgpu: ModuleType) -> None:
        self.device = CudaDevice(0)
        self._buffer = simgpu.DeviceBuffer(2 * BYTES + BLOCK)
        self.address = -(-self._buffer.ptr // BLOCK) * BLOCK
        self.spare = self.address + BYTES

    def put(self, image: Image, at: int = 0) -> None:
        self._buffer.put(image.tobytes(), self.address + at - self._buffer.ptr)

    def get(self) -> Image:
        return np.frombuffer(self._buffer.get(self.address - self._buffer.ptr, BYTES), np.uint8)

    def close(self) -> None:
        self._buffer.free()
        self.device.close()


def make(kind: str, memory: SimulatedMemory) -> PageKernels:
    if kind == "triton":
        pytest.importorskip("triton")
    return KINDS[kind](memory.device)


@pytest.fixture(scope="module")
def memory(simulator: ModuleType) -> Iterator[SimulatedMemory]:  # noqa: F811
    memory = SimulatedMemory(simulator)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kernels(kind: str, memory: SimulatedMemory) -> Iterator[PageKernels]:
    """One for all tests of a module: making one takes time. A test that closes them makes its own."""
    kernels = make(kind, memory)
    yield kernels
    assert kernels.close(SOON_S)

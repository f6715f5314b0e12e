"""Where a contender's records lie in memory: on the host, or on the device, seen from the host only through copies."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.engines.device import DeviceEngine
from gdsstore.memory.arena import Arena
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena

Bytes = npt.NDArray[np.uint8]
CLOSE_S = 10.0


class Place(Protocol):
    address: int
    size_bytes: int

    def put(self, offset: int, data: Bytes) -> None:
        """Copy host bytes to `offset`."""

    def get(self, offset: int, out: Bytes) -> None:
        """Copy `len(out)` bytes at `offset` to the host."""

    def close(self) -> None: ...


class HostPlace:
    """Huge pages where they are granted, pinned where CUDA is up: as the store's own arenas."""

    def __init__(self, size_bytes: int) -> None:
        self._arena = Arena(size_bytes)
        self.address, self.size_bytes = self._arena.address, self._arena.size_bytes

    def put(self, offset: int, data: Bytes) -> None:
        self._arena.array[offset : offset + len(data)] = data

    def get(self, offset: int, out: Bytes) -> None:
        out[:] = self._arena.array[offset : offset + len(out)]

    def close(self) -> None:
        self._arena.close(CLOSE_S)


class DevicePlace:
    """One allocation on the device that `engine` has registered. Raises DeviceError or EngineError where it cannot be had."""

    def __init__(self, size_bytes: int, engine: DeviceEngine) -> None:
        self._arena = DeviceArena(size_bytes, device=engine.device, registrars=[engine])
        self._cuda = CudaDevice(engine.device)
        self.address, self.size_bytes = self._arena.address, self._arena.size_bytes

    def put(self, offset: int, data: Bytes) -> None:
        self._cuda.copy(self.address + offset, data.ctypes.data, len(data))

    def get(self, offset: int, out: Bytes) -> None:
        self._cuda.copy(out.ctypes.data, self.address + offset, len(out))

    def close(self) -> None:
        self._arena.close(CLOSE_S)
        self._cuda.close()

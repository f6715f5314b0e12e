"""Where pages are loaded to: the host's memory, or a KV cache on the GPU with a buffer for the K and the V of each layer."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.engines.routes import PathSetting
from gdsstore.errors import GdsStoreError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_memory import DeviceMemory
from gdsstore.memory.device_views import DevicePieces
from gdsstore.replay.truth import count_wrong
from gdsstore.store import Store
from overlap_parts.sizes import LAYOUT

U8 = npt.NDArray[np.uint8]
PIECES = 2 * LAYOUT.layers
PIECE_BYTES = LAYOUT.page_bytes // PIECES


class Destination(Protocol):
    name: str

    def pages(self, count: int) -> Any:
        """Memory for so many pages, as `load` takes it."""

    def blank(self, count: int) -> None:
        """Overwrite them, so that a page that is not loaded is seen."""

    def wrong(self, keys: U8) -> int:
        """How many of the first pages do not hold what their keys say."""

    def close(self) -> None: ...


class HostDestination:
    """Huge pages of the store's."""

    name = "host"

    def __init__(self, store: Store, count: int) -> None:
        self._arena = store.arena(count * LAYOUT.page_bytes)
        self.memory: U8 = self._arena.array.reshape(count, LAYOUT.page_bytes)

    def pages(self, count: int) -> U8:
        return self.memory[:count]

    def blank(self, count: int) -> None:
        self.memory[:count] = 0

    def wrong(self, keys: U8) -> int:
        return len(count_wrong(keys, self.memory[: len(keys)]))

    def close(self) -> None:
        self._arena.close(30.0)


class DeviceDestination:
    """On GPU 0, real or simulated. Pages lie at random slots. `path`: how the drive reaches it."""

    def __init__(self, count: int, path: PathSetting) -> None:
        self.name = f"device {path}"
        self._device = CudaDevice(0)
        self._memory = DeviceMemory(self._device, count * LAYOUT.page_bytes)
        slots = np.random.default_rng(1).permutation(count).astype(np.uint64)
        buffers = self._memory.address + np.arange(PIECES, dtype=np.uint64) * np.uint64(count * PIECE_BYTES)
        self._address = buffers + slots[:, None] * np.uint64(PIECE_BYTES)

    def pages(self, count: int) -> DevicePieces:
        return DevicePieces(self._address[:count], [PIECE_BYTES] * PIECES, 0, self, streams=())

    def blank(self, count: int) -> None:
        nothing = np.zeros(PIECE_BYTES, np.uint8)
        for piece in self._address[:count].ravel().tolist():
            self._device.copy(piece, nothing.ctypes.data, PIECE_BYTES)

    def wrong(self, keys: U8) -> int:
        page = np.empty((1, LAYOUT.page_bytes), np.uint8)
        wrong = 0
        for key, pieces in zip(keys, self._address.tolist(), strict=False):
            for number, piece in enumerate(pieces):
                self._device.copy(page.ctypes.data + number * PIECE_BYTES, piece, PIECE_BYTES)
            wrong += len(count_wrong(key[None], page))
        return wrong

    def close(self) -> None:
        if not self._memory.free():
            raise GdsStoreError("the bench's device memory is still in use")
        self._device.close()

"""The faulty engine around an engine for device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.faults import Fault
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.faulty_bits import DeviceBits
from gdsstore.memory.cuda import CudaDevice


class FaultyDeviceEngine(FaultyEngine, DeviceEngine):
    """As `FaultyEngine`, for device memory. Counters, path and registered memory are the inner engine's.

    Raises DeviceError where the inner engine's device cannot be used.
    """

    inner: DeviceEngine

    def __init__(
        self, inner: DeviceEngine, faults: Sequence[Fault], seed: int, *, cuda_driver: Any | None = None
    ) -> None:
        self._cuda = CudaDevice(inner.device, cuda_driver)
        super().__init__(inner, faults, seed, bits=DeviceBits(self._cuda))
        self.device = inner.device
        self.path = inner.path
        self.moved = inner.moved

    @property
    def moved_again(self) -> int:
        return self.inner.moved_again

    @moved_again.setter
    def moved_again(self, count: int) -> None:
        self.inner.moved_again = count

    def register(self, address: int, nbytes: int) -> None:
        self.inner.register(address, nbytes)

    def deregister(self, address: int) -> None:
        self.inner.deregister(address)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        if not self.stuck:  # else copies in the device's memory are still in use
            self._cuda.close()

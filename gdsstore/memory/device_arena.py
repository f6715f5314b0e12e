"""A device arena: one plain allocation on a GPU, registered once, handed out in leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdsstore.errors import ArgumentError, StoreClosedError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_memory import DeviceMemory, DeviceView, Registrar
from gdsstore.memory.lease import Lease
from gdsstore.memory.leased import LeasedMemory, whole_slots

DEFAULT_BYTES = (
    512 << 20
)  # enough to keep drives busy; small against BAR1 and cuFile's limit of pinned memory


class DeviceArena(LeasedMemory):
    """Device memory for staging. `address` (a multiple of 64 KiB) and `device` (its ordinal) never change.

    The engines in `registrars` know the whole of it as one buffer for as long as it lives, so that a lease is addressed as
    registered base + offset. Its bytes cannot be seen from the host: `view` shows them to CuPy and torch.
    """

    def __init__(
        self,
        size_bytes: int = DEFAULT_BYTES,
        slot_bytes: int = ALIGNMENT,
        *,
        device: int = 0,
        registrars: Sequence[Registrar] = (),
        cuda_driver: Any | None = None,
    ) -> None:
        """Allocate `size_bytes`, rounded up to whole slots. Leases are rounded up to slots too (a multiple of 4 KiB).

        Initialises CUDA on `device`. `cuda_driver` stands in for the CUDA library.

        Raises ArgumentError for sizes that make no sense, DeviceError where there is no such device or not enough memory on
        it, EngineError where an engine refuses the memory.
        """
        size_bytes = whole_slots(size_bytes, slot_bytes)
        self._cuda = CudaDevice(device, cuda_driver)
        try:
            memory = DeviceMemory(self._cuda, size_bytes)
        except BaseException:
            self._cuda.close()
            raise
        try:
            for registrar in registrars:
                memory.register(registrar)
        except BaseException:
            if memory.free():
                self._cuda.close()
            raise
        super().__init__(memory, size_bytes, slot_bytes)
        self._memory: DeviceMemory | None = memory
        self.device = device
        self.address = memory.address

    def view(self, lease: Lease) -> DeviceView:
        """The bytes of a lease of this arena, uint8[lease.size_bytes]; valid until the lease ends.

        Raises ArgumentError for another arena's lease, StoreClosedError after `close`.
        """
        if self._memory is None:
            raise StoreClosedError("the arena was closed")
        if not self.address <= lease.address < self.address + self.size_bytes:
            raise ArgumentError("the lease is not of this arena", address=hex(lease.address))
        return DeviceView(lease.address, lease.size_bytes, lease)

    def _give_back(self) -> bool:
        if self._memory is not None:
            if not self._memory.free():
                return False
            self._memory = None
            self._cuda.close()
        return True

"""How the faulty engine reaches the memory that its inner engine moves: host memory, or a device's."""

from __future__ import annotations

import ctypes
import logging
import mmap
from typing import Protocol

from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_memory import DeviceMemory

log = logging.getLogger("gdsstore.engines")


class Copy(Protocol):
    """Bytes at `address`, which is aligned as O_DIRECT and cuFile want it. They go with the object."""

    @property
    def address(self) -> int: ...


class Bits(Protocol):
    """Memory of one kind."""

    def flip(self, address: int, bit: int) -> None:
        """Flip one bit, counted from `address`."""

    def copy(self, address: int, nbytes: int) -> Copy | None:
        """A copy in memory of the same kind; None where there is nothing to copy."""


class HostBits:
    def flip(self, address: int, bit: int) -> None:
        byte = ctypes.c_uint8.from_address(address + bit // 8)
        byte.value ^= 1 << bit % 8

    def copy(self, address: int, nbytes: int) -> Copy | None:
        copy = _HostCopy(nbytes)
        ctypes.memmove(copy.address, address, nbytes)
        return copy


class DeviceBits:
    """Does not own `device`. Copies are not registered with an engine, which moves and counts them as such memory."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def flip(self, address: int, bit: int) -> None:
        byte = ctypes.c_uint8()
        here, there = ctypes.addressof(byte), address + bit // 8
        try:
            self._device.copy(here, there, 1)
            byte.value ^= 1 << bit % 8
            self._device.copy(there, here, 1)
        except DeviceError as error:
            log.error("faulty engine: a bit was not flipped: %s", str(error))

    def copy(self, address: int, nbytes: int) -> Copy | None:
        if not self._device.holds(address, nbytes):
            return None
        try:
            copy = DeviceMemory(self._device, nbytes)
            self._device.copy(copy.address, address, nbytes)
        except DeviceError as error:
            log.error("faulty engine: a range was not copied: %s", str(error))
            return None
        return copy


class _HostCopy:
    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

"""The life of device memory of our own: registered, deregistered, and only then freed."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError, GdsStoreError
from gdsstore.memory.cuda import CudaDevice

log = logging.getLogger(__name__)

GPU_PAGE_BYTES = 64 << 10  # nvidia-fs pins, and BAR1 maps, whole pages of this size


class Registrar(Protocol):
    """Who wants to know memory before it is used: an engine for device memory."""

    def register(self, address: int, nbytes: int) -> None:
        """Raises EngineError where it is refused."""

    def deregister(self, address: int) -> None:
        """Unknown addresses are ignored. Raises EngineError where the memory may still be used: it is not freed then."""


class DeviceMemory:
    """Owns `length` bytes at `address`, a multiple of GPU_PAGE_BYTES, in one plain allocation on a device.

    Not from torch's or CuPy's pool: `expandable_segments` and other virtual memory cannot be registered with cuFile.
    """

    def __init__(self, device: CudaDevice, length: int) -> None:
        """Raises DeviceError where the device has not enough memory."""
        self.device = device
        self.length = length
        # The driver aligns to 256 or 512 bytes; small allocations share a page with others.
        allocation = device.allocate(length + GPU_PAGE_BYTES)
        self.address = -(-allocation // GPU_PAGE_BYTES) * GPU_PAGE_BYTES
        self._registrars: list[Registrar] = []  # shared with the finalizer
        self._finalizer = weakref.finalize(self, _free, device, allocation, self.address, self._registrars)
        # The process's end frees it anyway, and the driver may be gone by then.
        self._finalizer.atexit = False

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        raise ArgumentError(
            "the host cannot see device memory; make a DeviceView of the lease", address=hex(self.address)
        )

    def register(self, registrar: Registrar) -> None:
        """Make all bytes known to `registrar`. Raises EngineError where it refuses."""
        registrar.register(self.address, self.length)
        self._registrars.append(registrar)

    def free(self) -> bool:
        """Deregister and free; whether the memory is gone. Idempotent. Where a registrar does not let go, it is kept, and a
        later call tries again."""
        if not self._finalizer.alive:
            return True
        if not _deregister(self.address, self._registrars):
            return False
        self._finalizer()
        return True


class DeviceView:
    """Bytes of a device, for CuPy (`cupy.asarray`), torch (`torch.as_tensor`) and kvikio, without copying. Keeps `owner` alive."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self.address, self.nbytes, self.owner = address, nbytes, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def _deregister(address: int, registrars: list[Registrar]) -> bool:
    while registrars:
        try:
            registrars[-1].deregister(address)
        except GdsStoreError as error:
            log.error("device memory at %#x stays allocated: %s", address, str(error))
            return False
        registrars.pop()
    return True


def _free(device: CudaDevice, allocation: int, address: int, registrars: list[Registrar]) -> None:
    # The other way round can deadlock nvidia-fs, and leaves it with pages that are not ours any more.
    if _deregister(address, registrars) and not device.free(allocation):
        log.error("cuMemFree refused device memory at %#x; it stays allocated", allocation)

"""The life of a mapping: unpinned, then unmapped, and never under an array that still shows it."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.memory import pinning, syscalls

log = logging.getLogger(__name__)


class HostMemory:
    """Owns `length` mapped bytes at `address`.

    The arrays of `array` keep this object alive, and the bytes are unmapped when the last reference goes: an array used
    after its arena was closed is a mistake, but not a crash.
    """

    def __init__(self, address: int, length: int, *, writable: bool = True) -> None:
        self.address = address
        self.length = length
        self._writable = writable
        self._registrations: list[pinning.Registration] = []  # at most one; shared with the finalizer
        self._finalizer = weakref.finalize(self, _free, address, length, self._registrations)
        # The process's end unmaps anyway, and until then the kernel may be writing.
        self._finalizer.atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.length,),
            "typestr": "|u1",
            "data": (self.address, not self._writable),
            "version": 3,
        }

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, uint8[length]."""
        return np.asarray(self)

    def pin(self, cuda_driver: Any | None) -> str | None:
        """Page-lock all bytes for CUDA; None, or the reason why they are not."""
        result = pinning.register(self.address, self.length, cuda_driver, writable=self._writable)
        if isinstance(result, str):
            return result
        self._registrations.append(result)
        return None

    def unpin(self) -> None:
        """Undo `pin` now, instead of with the last reference: the driver may be gone by then."""
        _unpinned(self._registrations)  # what the driver keeps stays mapped: see _free


def _unpinned(registrations: list[pinning.Registration]) -> bool:
    return all(registration.release() for registration in registrations)


def _free(address: int, length: int, registrations: list[pinning.Registration]) -> None:
    # Unmapping what the driver still holds would leave it with pages that are not ours any more.
    if not _unpinned(registrations):
        return
    try:
        syscalls.unmap(address, length)
    except OSError as error:
        log.error("munmap of %d bytes gave %s; they stay mapped", length, syscalls.errno_name(error))

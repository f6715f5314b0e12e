"""Scratch memory of queued work: pinned on the host, so that copies do not wait, and beside it as much on the device."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice

log = logging.getLogger(__name__)

_PORTABLE = 1  # from cuda.h: pinned for every context
_MIN_BYTES = 64 << 10


class Scratch:
    """`nbytes` bytes or more, at `host` and at `device` (0: not asked for), both multiples of 256.

    Goes back to its pool with its last reference. Whoever queues work on it keeps it until that work has ended.
    """

    def __init__(self, pool: ScratchPool, host: int, device: int, nbytes: int) -> None:
        self.host, self.device, self.nbytes = host, device, nbytes
        self._pool: ScratchPool | None = pool

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.host, False), "version": 3}

    def array(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The first `count` elements on the host. The array keeps the scratch."""
        return np.asarray(self)[: count * np.dtype(dtype).itemsize].view(dtype)

    def abandon(self) -> None:
        """Never use or free the memory again: nobody knows whether the device still does."""
        self._pool = None

    def __del__(self) -> None:
        # At the process's end the driver may be gone, and what it holds goes with the process.
        if self._pool is not None and not sys.is_finalizing():
            self._pool.give_back(self)


class ScratchPool:
    """Lends scratch memory and keeps it: freeing may wait for all work on the device. Thread-safe."""

    def __init__(self, device: CudaDevice, *, mirrored: bool) -> None:
        """`mirrored`: with device memory beside the host's."""
        self._device = device
        self._mirrored = mirrored
        self._closed = False
        self._free: dict[int, deque[tuple[int, int]]] = {}

    def take(self, nbytes: int) -> Scratch:
        """Raises DeviceError where there is not enough memory."""
        # Sizes are powers of two, so that calls of many sizes share a few blocks.
        size = max(_MIN_BYTES, 1 << (max(nbytes, 1) - 1).bit_length())
        try:
            host, device = self._free[size].pop()
        except (KeyError, IndexError):
            host, device = self._allocate(size)
        return Scratch(self, host, device, size)

    def give_back(self, scratch: Scratch) -> None:
        # One step each and no lock: a destructor may run anywhere, also inside this pool's own code.
        self._free.setdefault(scratch.nbytes, deque()).append((scratch.host, scratch.device))
        if self._closed:
            self._drain()

    def close(self) -> None:
        """Free what is not lent; the rest is freed when it comes back. Idempotent."""
        self._closed = True
        self._drain()

    def _allocate(self, nbytes: int) -> tuple[int, int]:
        host = ctypes.c_void_p()
        size = ctypes.c_size_t(nbytes)
        self._device.do(
            "cuMemHostAlloc",
            lambda cuda: cuda.cuMemHostAlloc(ctypes.byref(host), size, _PORTABLE),
            nbytes=nbytes,
        )
        address = host.value or 0
        if not self._mirrored:
            return address, 0
        try:
            return address, self._device.allocate(nbytes)
        except DeviceError:
            self._release(address, 0)
            raise

    def _drain(self) -> None:
        for blocks in list(self._free.values()):
            while blocks:
                try:
                    host, device = blocks.pop()
                except IndexError:
                    break  # another thread took the last one
                self._release(host, device)

    def _release(self, host: int, device: int) -> None:
        if not self._device.usable:
            return
        code = self._device.ask(lambda cuda: cuda.cuMemFreeHost(ctypes.c_void_p(host)))
        if code or (device and not self._device.free(device)):
            log.error("scratch memory of a GPU could not be freed", extra={"cuda_error": code})

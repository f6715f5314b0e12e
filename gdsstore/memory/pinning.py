"""Page-locking memory for CUDA (`cudaHostRegister`), through the driver library and without importing any CUDA package.

Never starts CUDA: a context made here would cost seconds and hundreds of MB on a GPU that the process may not be meant to
use, and a process that only initialised CUDA can no longer fork children that use it. Memory is pinned where the process
already has a context; else the reason is reported.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

from gdsstore.memory.cuda import LIBRARY, error_name, within

log = logging.getLogger(__name__)

# From cuda.h. Portable: pinned for every context, not only the one at hand.
_PORTABLE = 1
_READ_ONLY = (
    8  # for memory that this process cannot write; the driver refuses it where the device cannot either
)
_NOT_INITIALIZED = 3
# The driver is shutting down, or the context or registration is gone already: nothing is pinned any more.
_GONE = frozenset({4, 709, 713})


def register(address: int, length: int, driver: Any | None, *, writable: bool = True) -> Registration | str:
    """Pin `length` bytes at `address`; or the reason why they are not pinned."""
    if driver is None:
        return f"not pinned: the loader finds no {LIBRARY}"
    device = _active_device(driver)
    if isinstance(device, str):
        return f"not pinned: {device}"
    context = ctypes.c_void_p()
    code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if code:
        return f"not pinned: cuDevicePrimaryCtxRetain gave {error_name(driver, code)}"
    flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
    code = within(
        driver,
        context,
        lambda: driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_uint(flags)
        ),
    )
    if code:
        driver.cuDevicePrimaryCtxRelease_v2(device)
        return f"not pinned: cuMemHostRegister gave {error_name(driver, code)}"
    return Registration(driver, device, context, address)


class Registration:
    """Pinned memory. To be released before the memory is unmapped."""

    def __init__(self, driver: Any, device: int, context: ctypes.c_void_p, address: int) -> None:
        self._driver = driver
        self._device = device
        self._context = context
        self._address = address
        self._owner_pid = os.getpid()
        self._released = False

    def release(self) -> bool:
        """Unpin. False where the driver did not let go of the memory, which must then stay mapped. Idempotent."""
        # CUDA is unusable in a forked child, and what is pinned is the parent's memory, not the child's copy.
        if self._released or os.getpid() != self._owner_pid:
            return True
        driver = self._driver
        code = within(
            driver, self._context, lambda: driver.cuMemHostUnregister(ctypes.c_void_p(self._address))
        )
        if code and code not in _GONE:
            log.error("cuMemHostUnregister gave %s; the memory stays mapped", error_name(driver, code))
            return False
        self._released = True
        driver.cuDevicePrimaryCtxRelease_v2(self._device)
        return True


def _active_device(driver: Any) -> int | str:
    """The first device on which this process has a primary context, or why there is none."""
    count = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code == _NOT_INITIALIZED:
        return "CUDA is not initialised in this process; open the store after the first use of the GPU"
    if code:
        return f"cuDeviceGetCount gave {error_name(driver, code)}"
    for device in range(count.value):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        if (
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
            and active.value
        ):
            return device
    return "this process has no CUDA context; open the store after the first use of the GPU"

"""The CUDA driver library through ctypes, as far as moving bytes needs it. No CUDA package is imported."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gdsstore.errors import DeviceError

LIBRARY = "libcuda.so.1"

# From cuda.h.
_NON_BLOCKING = 1  # a stream that does not wait for the default stream
_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9  # pointer attributes
_DEVICE_MEMORY = 2  # a memory type
# The driver is shutting down, or the context is gone already, and with it all that was allocated in it.
_GONE = frozenset({4, 201, 709})


def load_driver(name: str = LIBRARY) -> Any | None:
    """The CUDA driver library, or None where the loader finds none."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def error_name(driver: Any, code: int) -> str:
    """The name of a CUresult."""
    text = ctypes.c_char_p()
    if driver.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value:
        return text.value.decode()
    return f"error {code}"


def within(driver: Any, context: ctypes.c_void_p, action: Callable[[], int]) -> int:
    """Run `action` with `context` current and put the caller's own back; the first error code, or 0."""
    code = int(driver.cuCtxPushCurrent_v2(context))
    if code:
        return code
    try:
        return int(action())
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def device_of(address: int, driver: Any | None = None) -> int | None:
    """The ordinal of the device whose memory `address` is in; None for host memory, and where there is no driver."""
    driver = load_driver() if driver is None else driver
    if driver is None:
        return None
    kind, ordinal = ctypes.c_uint(), ctypes.c_int()
    for attribute, out in ((_MEMORY_TYPE, kind), (_DEVICE_ORDINAL, ordinal)):
        if driver.cuPointerGetAttribute(ctypes.byref(out), ctypes.c_int(attribute), ctypes.c_uint64(address)):
            return None
    return ordinal.value if kind.value == _DEVICE_MEMORY else None


def current_device(driver: Any | None = None) -> int:
    """The ordinal of this thread's device; 0 where it has none."""
    driver = load_driver() if driver is None else driver
    ordinal = ctypes.c_int()
    return 0 if driver is None or driver.cuCtxGetDevice(ctypes.byref(ordinal)) else ordinal.value


class CudaDevice:
    """One GPU, with its primary context (the one that torch and CuPy use) held until `close`. Thread-safe."""

    def __init__(self, ordinal: int = 0, driver: Any | None = None) -> None:
        """Initialises CUDA where nobody has. `driver` stands in for the CUDA library.

        Raises DeviceError where this machine has no driver or no such device.
        """
        driver = load_driver() if driver is None else driver
        if driver is None:
            raise DeviceError(f"the loader finds no {LIBRARY}: device memory needs an NVIDIA driver")
        self.ordinal = ordinal
        self._driver = driver
        self._owner_pid = os.getpid()
        self._context = ctypes.c_void_p()
        self._held = False
        self._streams = threading.local()
        self._made: list[ctypes.c_void_p] = []
        self._check(driver.cuInit(0), "cuInit")
        count = ctypes.c_int()
        self._check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        if not 0 <= ordinal < count.value:
            raise DeviceError("this machine has no such device", device=ordinal, devices=count.value)
        code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), ordinal)
        self._check(code, "cuDevicePrimaryCtxRetain")
        self._held = True

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` bytes by cuMemAlloc. Raises DeviceError where there is not enough memory."""
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes)
        code = self._within(lambda: self._driver.cuMemAlloc_v2(ctypes.byref(address), size))
        self._check(code, "cuMemAlloc", nbytes=nbytes)
        return address.value

    def free(self, address: int) -> bool:
        """Free what `allocate` gave; whether the memory is gone. Nothing is done in a forked child, where CUDA does not work."""
        if os.getpid() != self._owner_pid:
            return True
        code = self._within(lambda: self._driver.cuMemFree_v2(ctypes.c_uint64(address)))
        return code == 0 or code in _GONE

    def enter(self) -> None:
        """Make the context current in this thread, for good: for the threads of an engine."""
        self._check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The context is current in this thread, and afterwards the one that was before."""
        self._check(self._driver.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Address and bytes of the allocation that `address` is in. Raises DeviceError where it is in none."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._within(
            lambda: self._driver.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
        )
        self._check(code, "cuMemGetAddressRange", address=hex(address))
        return base.value, size.value

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether both ends of a range are in memory of this device."""
        return all(
            end >= 0 and device_of(end, self._driver) == self.ordinal
            for end in (address, address + nbytes - 1)
        )

    def copy(self, to: int, at: int, nbytes: int) -> None:
        """Copy between device and host addresses, in any direction, and wait for the end.

        On a stream of the thread's own, so that it waits for no kernel of anybody's. Raises DeviceError.
        """

        if not self._held:
            raise DeviceError("the device was let go of already", device=self.ordinal)

        def action() -> int:
            stream = self._stream()
            code = self._driver.cuMemcpyAsync(
                ctypes.c_uint64(to), ctypes.c_uint64(at), ctypes.c_size_t(nbytes), stream
            )
            return int(code or self._driver.cuStreamSynchronize(stream))

        self._check(self._within(action), "a copy", to=hex(to), at=hex(at), nbytes=nbytes)

    @property
    def usable(self) -> bool:
        """Not let go of, and not in a forked child, where CUDA does not work."""
        return self._held and os.getpid() == self._owner_pid

    def do(self, what: str, call: Callable[[Any], int], **context: Any) -> None:
        """Make a call of the driver library's with the context current. Raises DeviceError, which names `what` and `context`."""
        if not self._held:
            raise DeviceError("the device was let go of already", device=self.ordinal)
        self._check(self._within(lambda: int(call(self._driver))), what, **context)

    def ask(self, call: Callable[[Any], int]) -> int:
        """Make a call of the driver library's with the context current; its CUresult."""
        return self._within(lambda: int(call(self._driver)))

    def close(self) -> None:
        """Let go of the context. Idempotent. Only after everything allocated was freed."""
        if not self._held or os.getpid() != self._owner_pid:
            return
        self._held = False
        made, self._made = self._made, []
        for stream in made:
            self._within(lambda stream=stream: self._driver.cuStreamDestroy_v2(stream))  # type: ignore[misc]
        self._driver.cuDevicePrimaryCtxRelease_v2(self.ordinal)

    def _stream(self) -> ctypes.c_void_p:
        stream: ctypes.c_void_p | None = getattr(self._streams, "stream", None)
        if stream is None:
            stream = ctypes.c_void_p()
            self._check(self._driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "cuStreamCreate")
            self._streams.stream = stream
            self._made.append(stream)
        return stream

    def _within(self, action: Callable[[], int]) -> int:
        return within(self._driver, self._context, action)

    def _check(self, code: int, what: str, **context: Any) -> None:
        if code:
            name = error_name(self._driver, code)
            raise DeviceError(f"{what} gave {name}", device=self.ordinal, **context)

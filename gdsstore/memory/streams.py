"""Streams and events through the CUDA driver: what orders our copies and kernels with those of others.

Nothing here blocks in the driver: a stream may hold work that never ends, and every wait has a deadline.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.waiting import Deadline

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

# From cuda.h.
_NON_BLOCKING = 1
_NO_TIMING = 2
_NOT_READY = 600
_POLL_MIN_S, _POLL_MAX_S = 20e-6, 1e-3

# A single error does not say that work has ended. A context that gives nothing but errors for so long has stopped for good.
LOST_S = 0.1


class Event:
    """A point in a stream. Its driver object is destroyed with it, which a stream that still waits for it does not mind."""

    def __init__(self, device: CudaDevice, stream: int) -> None:
        """Recorded on `stream` (a handle: ours, torch's, or 0 for the legacy default stream). Raises DeviceError."""
        self._device = device
        self._handle = ctypes.c_void_p()
        device.do("cuEventCreate", lambda cuda: cuda.cuEventCreate(ctypes.byref(self._handle), _NO_TIMING))
        device.do("cuEventRecord", lambda cuda: cuda.cuEventRecord(self._handle, ctypes.c_void_p(stream)))

    @property
    def handle(self) -> ctypes.c_void_p:
        return self._handle

    @property
    def done(self) -> bool:
        """Whether everything before it in its stream has ended. Raises DeviceError where that failed."""
        code = self._device.ask(lambda cuda: cuda.cuEventQuery(self._handle))
        if code not in (0, _NOT_READY):
            raise DeviceError("work on the device failed", device=self._device.ordinal, cuda_error=code)
        return code == 0

    def wait(self, timeout_s: float) -> bool:
        """Wait for it in this thread, at most `timeout_s`; whether it came. Raises DeviceError as `done` does."""
        deadline = Deadline(timeout_s)
        patience = _POLL_MIN_S
        while not self.done:
            if deadline.passed:
                return False
            time.sleep(min(patience, deadline.left_s))
            patience = min(patience * 2, _POLL_MAX_S)
        return True

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and handle.value and self._device.usable:
            self._device.ask(lambda cuda: cuda.cuEventDestroy_v2(handle))


class AllOf:
    """Several events as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = tuple(events)

    def wait(self, timeout_s: float) -> bool:
        """See `Event.wait`."""
        deadline = Deadline(timeout_s)
        return all(event.wait(deadline.left_s) for event in self._events)


class Stream:
    """A stream of our own, which waits for no other unless told. Used by one thread at a time."""

    def __init__(self, device: CudaDevice) -> None:
        """Raises DeviceError."""
        self.device = device
        self._lock = threading.Lock()
        self._handle = ctypes.c_void_p()
        device.do(
            "cuStreamCreate", lambda cuda: cuda.cuStreamCreate(ctypes.byref(self._handle), _NON_BLOCKING)
        )

    @property
    def handle(self) -> int:
        """For torch.cuda.ExternalStream and others."""
        return self._handle.value or 0

    def wait_for(self, event: Event) -> None:
        """What is queued from now on begins after `event`. Does not wait here."""
        self._do("cuStreamWaitEvent", lambda cuda: cuda.cuStreamWaitEvent(self._handle, event.handle, 0))

    def record(self) -> Event:
        """The point behind everything queued so far."""
        return Event(self.device, self.handle)

    def copy(self, to: int, at: int, nbytes: int) -> None:
        """Queue a copy between device and host addresses. Host memory that is not pinned makes the driver wait here."""
        self._do(
            "cuMemcpyAsync",
            lambda cuda: cuda.cuMemcpyAsync(
                ctypes.c_uint64(to), ctypes.c_uint64(at), ctypes.c_size_t(nbytes), self._handle
            ),
        )

    def copy_each(self, to: U64, at: U64, nbytes: I64) -> I32:
        """Queue copies, as `copy` does one; the driver's error of each, 0 where it is queued. Shapes (n,).

        Raises DeviceError where none was queued.
        """
        errors = np.zeros(len(to), np.int32)

        def queue(cuda: Any) -> int:
            rows = zip(to.tolist(), at.tolist(), nbytes.tolist(), strict=True)
            for i, (destination, source, count) in enumerate(rows):
                errors[i] = cuda.cuMemcpyAsync(
                    ctypes.c_uint64(destination),
                    ctypes.c_uint64(source),
                    ctypes.c_size_t(count),
                    self._handle,
                )
            return 0

        self._do("cuMemcpyAsync", queue)
        return errors

    def zero(self, address: int, nbytes: int) -> None:
        """Queue zeros into device memory."""
        self._do(
            "cuMemsetD8Async",
            lambda cuda: cuda.cuMemsetD8Async(
                ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), self._handle
            ),
        )

    def close(self) -> None:
        """Idempotent. What is queued still runs; the driver frees the stream behind it."""
        with self._lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
        if handle.value and self.device.usable:
            self.device.ask(lambda cuda: cuda.cuStreamDestroy_v2(handle))

    def _do(self, what: str, call: Any) -> None:
        if not self._handle.value:
            raise DeviceError("the stream was closed", device=self.device.ordinal)
        self.device.do(what, call)

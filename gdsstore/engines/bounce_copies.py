"""The device's side of the bounce engine: which ranges are the device's, and copies of them."""

from __future__ import annotations

import logging
import time

import numpy as np

from gdsstore.engines.base import I64, U64
from gdsstore.engines.device import Mask, Registered
from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.streams import LOST_S, Event, Stream

log = logging.getLogger("gdsstore.engines")


class Copies:
    """Copies queued on a stream, one for each run of ranges that is contiguous on both sides."""

    def __init__(self, stream: Stream, to: U64, at: U64, nbytes: I64) -> None:
        """Shapes (n,), n > 0."""
        self._stream = stream
        self._event: Event | None = None
        self._failing_since: float | None = None
        size = nbytes.astype(np.uint64)
        follows = (to[1:] == to[:-1] + size[:-1]) & (at[1:] == at[:-1] + size[:-1])
        first = np.flatnonzero(np.append(True, ~follows))
        ranges = np.diff(np.append(first, len(to)))  # of each run
        failed = self._queue(to[first], at[first], np.add.reduceat(nbytes, first))
        self._failed: Mask = np.repeat(failed, ranges)
        # Allocations may lie side by side, and no copy may go over from one to the next.
        again = np.flatnonzero(self._failed & np.repeat(ranges > 1, ranges))
        if len(again):
            self._failed[again] = self._queue(to[again], at[again], nbytes[again])

    def _queue(self, to: U64, at: U64, nbytes: I64) -> Mask:
        """Which copies could not be queued."""
        try:
            errors = self._stream.copy_each(to, at, nbytes)
        except DeviceError as error:
            log.warning("%s", str(error))
            return np.ones(len(to), np.bool_)
        failed: Mask = errors != 0
        if failed.any():
            log.warning(
                "%d of %d copies failed: CUDA errors %s", failed.sum(), len(to), np.unique(errors[failed])
            )
        return failed

    @property
    def failed(self) -> Mask:
        """Which ranges were not copied; true once `ended` is. Shape (n,)."""
        return self._failed

    @property
    def ended(self) -> bool:
        """Whether the device has let go of the memory. Polls."""
        if self._failed.all():
            return True
        try:
            if self._event is None:
                self._event = self._stream.record()
            return self._event.done
        except DeviceError as error:
            # The copies may go on behind a single error: that the memory is free must be seen, not guessed.
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since < LOST_S:
                return False
            log.warning("the end of copies cannot be seen: %s", str(error))
            self._failed = np.ones(len(self._failed), np.bool_)
            return True


def reachable(device: CudaDevice, registered: Registered, address: U64, length: I64) -> Mask:
    """Which ranges lie whole in memory of the device. The driver is asked once an allocation, not once a range. Shape (n,).

    To the driver, an address that is not the device's is host memory: a copy there would overwrite it.
    """
    known, _, _ = registered.find(address, length)
    unknown = np.flatnonzero(~known)
    order = unknown[np.argsort(address[unknown], kind="stable")]
    starts, lengths = address[order], length[order]
    at = 0
    while at < len(order):
        end = _end_of_memory(device, int(starts[at]), int(lengths[at]))
        stop = int(np.searchsorted(starts, np.uint64(end), side="left"))
        inside = lengths[at:stop] <= (np.uint64(end) - starts[at:stop]).astype(np.int64)
        known[order[at:stop]] = inside
        outside = np.flatnonzero(~inside[1:])  # these may go on in the next allocation
        at += 1 + int(outside[0]) if len(outside) else max(stop - at, 1)
    return known


def _end_of_memory(device: CudaDevice, address: int, nbytes: int) -> int:
    """Where the device's memory at `address` ends, or `nbytes` from there or later; `address` where it is not the device's."""
    end = address
    try:
        while end < address + nbytes and device.holds(end, 1):
            base, size = device.allocation_of(end)  # virtual memory is made of many
            end = base + size
    except DeviceError as error:
        log.warning("%s", str(error))
    return end

"""What engines for device memory promise beyond `base.py`, and the memory that they were told of."""

from __future__ import annotations

import threading
from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I64, U64, Engine, RangePlan
from gdsstore.engines.paths import Path, PathCounters
from gdsstore.errors import ArgumentError
from gdsstore.layout import ALIGNMENT

Mask = npt.NDArray[np.bool_]


class DeviceEngine(Engine):
    """Moves ranges between the memory of one device and attached files.

    Addresses are device addresses. File offset, length and address may be of any alignment; what is not a multiple of 4 KiB,
    or not registered, goes through host memory and is counted so. An address that is not the device's is EFAULT.

    The caller waits, before a WRITE, for the kernels that fill the memory, and lets none read it before a READ is done:
    engines know nothing of streams.
    """

    device: int  # its ordinal
    path: Path  # the best way there is for it here
    moved: PathCounters
    moved_again: int  # ranges that failed on the way above, and then went through host memory

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Make `nbytes` bytes known as one buffer, until `deregister`: ranges in it are addressed as its base + offset.

        Raises ArgumentError where it overlaps another, EngineError where it is refused.
        """

    @abstractmethod
    def deregister(self, address: int) -> None:
        """Forget the buffer at `address`. Unknown ones are ignored. Must come before the memory is freed.

        Raises EngineError where calls that hang may still use it: the memory must not be freed then.
        """


class Registered:
    """Registered buffers, looked up for a whole plan at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: tuple[U64, I64] = (np.zeros(0, np.uint64), np.zeros(0, np.int64))  # bases, sorted; sizes

    def add(self, address: int, nbytes: int) -> None:
        """Raises ArgumentError where the bytes overlap a buffer."""
        if address <= 0 or nbytes <= 0:
            raise ArgumentError("a buffer has an address and a size", address=address, nbytes=nbytes)
        with self._lock:
            bases, sizes = self._table
            at = int(np.searchsorted(bases, np.uint64(address)))
            after = at < len(bases) and int(bases[at]) < address + nbytes
            before = at > 0 and int(bases[at - 1]) + int(sizes[at - 1]) > address
            if before or after:
                raise ArgumentError("the memory is registered already", address=hex(address), nbytes=nbytes)
            self._table = np.insert(bases, at, np.uint64(address)), np.insert(sizes, at, nbytes)

    def discard(self, address: int) -> bool:
        """Whether there was a buffer at `address`."""
        with self._lock:
            bases, sizes = self._table
            keep = bases != np.uint64(address)
            self._table = bases[keep], sizes[keep]
            return not keep.all()

    @property
    def addresses(self) -> list[int]:
        return [int(base) for base in self._table[0]]

    def find(self, address: U64, length: I64) -> tuple[Mask, U64, I64]:
        """Which ranges lie whole in a buffer, and the base and size of that; elsewhere the range's own. Shapes (n,)."""
        bases, sizes = self._table
        if len(bases) == 0:
            return np.zeros(len(address), np.bool_), address, length
        at = np.searchsorted(bases, address, side="right") - 1
        base, size = (
            bases[at],
            sizes[at],
        )  # of the last buffer where there is none before; it then begins too late
        offset = (address - base).astype(np.int64)  # wraps to something huge or negative then
        inside: Mask = (address >= base) & (offset >= 0) & (length <= size - offset)
        return inside, np.where(inside, base, address), np.where(inside, size, length)


def touches(plan: RangePlan, address: int, nbytes: int) -> bool:
    """Whether a range of the plan has a byte in the buffer."""
    low, high = np.uint64(address), np.uint64(address + nbytes)
    return bool(((plan.address < high) & (plan.address + plan.length.astype(np.uint64) > low)).any())


def aligned(plan: RangePlan) -> Mask:
    """Which ranges a drive and a GPU can exchange without a bounce buffer between. Shape (n,)."""
    odd = plan.file_offset | plan.length | plan.address.view(np.int64)
    return np.asarray(odd % ALIGNMENT == 0, np.bool_)

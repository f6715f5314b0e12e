"""A lease: the right to use some bytes of an arena.

It ends in one of two ways: `release`, after which its bytes are free, or `quarantine`, after which they are free once the
kernel has let go of them. A pinned lease ends when its last pin goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError

if TYPE_CHECKING:
    from gdsstore.memory.lease_pool import LeasePool


class Memory(Protocol):
    """What leases are cut from."""

    @property
    def address(self) -> int: ...

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes. Raises ArgumentError where the host cannot see them."""


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Where an arena's bytes are, and how often someone waited for some. Sizes in bytes, rounded up to slots."""

    size_bytes: int
    leased_bytes: int
    quarantined_bytes: int
    peak_bytes: int  # the most that was ever leased or quarantined at once
    waits: int  # leases that had to wait for room
    timeouts: int  # of these, the ones that got none in time


class Lease:
    """`size_bytes` bytes at `address`, a multiple of 4 KiB, for one user. A context manager that releases.

    The bytes after them, up to `reserved_bytes` (whole slots), belong to the lease too: room for padding. Thread-safe.
    """

    __slots__ = (
        "_done",
        "_ended",
        "_memory",
        "_offset",
        "_pins",
        "_pool",
        "address",
        "reserved_bytes",
        "size_bytes",
    )

    def __init__(self, pool: LeasePool, memory: Memory, offset: int, size_bytes: int, reserved: int) -> None:
        self.address = memory.address + offset
        self.size_bytes = size_bytes
        self.reserved_bytes = reserved
        self._pool = pool
        self._memory: Memory | None = memory
        self._offset = offset
        self._pins = 0
        self._ended = False
        self._done: Callable[[], bool] | None = None

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, uint8[size_bytes]; others may get them once the lease has ended. Raises ArgumentError then, and where
        they are in device memory."""
        memory = self._memory
        if memory is None:
            raise ArgumentError("the lease has ended; its bytes may belong to someone else")
        return memory.array[self._offset : self._offset + self.size_bytes]

    def pin(self) -> None:
        """Put off the end of the lease until `unpin`. Raises ArgumentError if it was released already."""
        self._pool.pin(self)

    def unpin(self) -> None:
        """Take one pin away. Raises ArgumentError if there is none."""
        self._pool.unpin(self)

    def release(self) -> None:
        """End the lease; nothing may use its bytes any more. Idempotent, and without effect after `quarantine`."""
        self._pool.end(self, None)

    def quarantine(self, done: Callable[[], bool]) -> None:
        """End the lease, but let nobody have its bytes until `done()` is true.

        For bytes that the kernel or a GPU may still write to. `done` must not block, is called by one thread at a time,
        and counts as false if it raises. Raises ArgumentError if the bytes were given back or quarantined already.
        """
        self._pool.end(self, done)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

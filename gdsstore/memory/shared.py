"""An arena that other processes can map, and their side of it: the same bytes, to be read only."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError, StoreError
from gdsstore.memory.arena import Arena, Mode, Wishes
from gdsstore.memory.cuda import load_driver
from gdsstore.memory.hugepages import PageGrant, huge_page_bytes
from gdsstore.memory.mapping import HostMemory
from gdsstore.memory.memfd import map_aligned, map_memfd


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """`fd`: a sealed memfd, for others to map with `SharedView`; it belongs to its arena, as do its `size_bytes` bytes."""

    fd: int
    size_bytes: int


class SharedArena(Arena):
    """An arena whose bytes lie in a sealed memfd: only this process writes them, and whoever is handed `shared.fd` reads.

    Closed like any other. Readers that have it mapped then keep the memory, until they unmap it.
    """

    _fd_closer: weakref.finalize[[int], SharedArena] | None = None

    @property
    def shared(self) -> SharedMemory:
        return SharedMemory(self._fd, self.size_bytes)

    def _map(self, size_bytes: int, wishes: Wishes) -> PageGrant:
        found = map_memfd(
            size_bytes,
            huge_pages=wishes.huge_pages,
            prefault=wishes.prefault,
            deadline=wishes.deadline,
            place=wishes.place,
            sysfs=wishes.sysfs,
        )
        self._fd = found.fd
        self._fd_closer = weakref.finalize(self, os.close, found.fd)
        self._fd_closer.atexit = False
        return found.pages

    def _give_back(self) -> bool:
        if self._fd_closer is not None:
            self._fd_closer()
        return super()._give_back()


class SharedView:
    """Another process's shared arena, mapped here to be read: `size_bytes` bytes at `address`.

    Nothing in it is to be trusted, and it may change at any time. It stays mapped, and pinned, while anybody refers to this
    object or to its array, whatever becomes of the descriptor and of the other process. `notes` says why it is not pinned, if so.
    """

    def __init__(
        self, fd: int, size_bytes: int, *, pin: Mode = "auto", cuda_driver: Any | None = None
    ) -> None:
        """Map the memory of `fd`, which stays the caller's. `pin` "auto": for CUDA, where this process uses CUDA already.

        Raises ArgumentError for sizes that make no sense, StoreError for memory that could get smaller under a reader, or is
        smaller, and where the kernel does not map it.
        """
        if size_bytes <= 0:
            raise ArgumentError("a shared memory has at least one byte", size_bytes=size_bytes)
        length, alignment = _checked(fd, size_bytes)
        try:
            address = map_aligned(fd, length, alignment, writable=False)
        except OSError as error:
            raise StoreError("the shared memory cannot be mapped", errno=error.errno) from error
        self._memory = HostMemory(address, length, writable=False)
        self.address, self.size_bytes = address, size_bytes
        not_pinned: str | None = "not pinned: not asked for"
        if pin != "off":
            not_pinned = self._memory.pin(cuda_driver if cuda_driver is not None else load_driver())
        self.pinned = not_pinned is None
        self.notes = () if not_pinned is None else (not_pinned,)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, uint8[size_bytes], not writable."""
        return self._memory.array[: self.size_bytes]


def _checked(fd: int, size_bytes: int) -> tuple[int, int]:
    """The whole length of a shared memory, and where huge pages of it want to begin."""
    try:
        facts, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise StoreError("this is no memory that a process shares", errno=error.errno) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise StoreError("the shared memory is not sealed: it could go away under its readers")
    if facts.st_size < size_bytes:
        raise StoreError(
            "the shared memory is smaller than it should be",
            size_bytes=facts.st_size,
            expected_bytes=size_bytes,
        )
    # hugetlb is mapped in whole pages of its own, and says how large they are.
    page_bytes = facts.st_blksize if facts.st_blksize > mmap.PAGESIZE else huge_page_bytes()
    return facts.st_size, page_bytes

"""An arena: one big aligned allocation, pre-faulted, on the best pages that are granted, handed out in leases."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError, StoreClosedError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory import numa, pinning
from gdsstore.memory.hugepages import PageKind, map_ladder
from gdsstore.memory.lease import ArenaStats, Lease
from gdsstore.memory.lease_pool import LeasePool
from gdsstore.memory.mapping import HostMemory
from gdsstore.memory.placement import Placement
from gdsstore.waiting import Deadline

__all__ = ["Arena", "ArenaStats", "Grant", "Lease", "Mode"]

log = logging.getLogger(__name__)

Mode = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class Grant:
    """What an arena was given. `notes` says of each better thing why it was not."""

    pages: PageKind
    page_bytes: int
    numa_node: int | None  # None: not bound, or not where it was asked for
    pinned: bool
    notes: tuple[str, ...]


class Arena:
    """Host memory for staging, in leases of any size at multiples of 4 KiB. Thread-safe.

    Use as a context manager, or `close` it. `address` (bytes, a multiple of 2 MiB) and `size_bytes` never change.
    """

    def __init__(
        self,
        size_bytes: int,
        slot_bytes: int = ALIGNMENT,
        *,
        huge_pages: Mode = "auto",
        numa_node: int = -1,
        pin: Mode = "auto",
        prefault: bool = True,
        timeout_s: float = 600.0,
        sysfs: Path = numa.SYSFS,
        cuda_driver: Any | None = None,
    ) -> None:
        """Allocate `size_bytes`, rounded up to whole slots. Leases are rounded up to slots too (a multiple of 4 KiB).

        `numa_node` -1 leaves the node to the kernel. `pin` "auto" pins for CUDA where this process uses CUDA already.
        Memory that is not pre-faulted is granted by its first use. `cuda_driver` stands in for the CUDA library.

        Raises ArgumentError for sizes or modes that make no sense or a node this machine lacks, StoreError where there is
        not enough memory, DeadlineError where touching it takes longer than `timeout_s`.
        """
        _check(size_bytes, slot_bytes, huge_pages, pin)
        self.size_bytes = -(-size_bytes // slot_bytes) * slot_bytes
        self.slot_bytes = slot_bytes
        placement = Placement(numa_node, sysfs)
        pages = map_ladder(
            self.size_bytes,
            huge_pages=huge_pages == "auto",
            prefault=prefault,
            deadline=Deadline(timeout_s),
            place=placement.place,
            sysfs=sysfs,
        )
        memory = HostMemory(pages.address, pages.length)
        not_pinned = _pin(memory, pin, cuda_driver)
        self._memory: HostMemory | None = memory
        self._pool = LeasePool(memory, self.size_bytes, slot_bytes)
        self._closing = threading.Lock()
        self.address = pages.address
        node = placement.node_of(pages.address, pages.length, touched=prefault)
        self.grant = Grant(
            pages.kind,
            pages.page_bytes,
            node,
            not_pinned is None,
            (*pages.notes, *placement.notes, *filter(None, (not_pinned,))),
        )

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, uint8[size_bytes], leased or not. Raises StoreClosedError after `close`."""
        memory = self._memory
        if memory is None:
            raise StoreClosedError("the arena was closed")
        return memory.array[: self.size_bytes]

    def lease(self, nbytes: int, timeout_s: float) -> Lease:
        """`nbytes` contiguous bytes, after at most `timeout_s` seconds (0: now or not at all).

        Requests are served in the order they came: a large one is not overtaken by small ones for ever. Do not wait for a
        second lease while holding one that the second needs to have released. The bytes hold what was last in them.

        Raises ArgumentError at once for a request that never fits, DeadlineError where there was no room in time,
        StoreClosedError once the arena is closed.
        """
        return self._pool.lease(nbytes, timeout_s)

    def stats(self) -> ArenaStats:
        """Where the bytes are now."""
        return self._pool.stats()

    def close(self, timeout_s: float) -> bool:
        """Refuse new leases, wait for the old ones and for quarantined bytes, then unpin and unmap. Idempotent.

        Returns False where some had not ended after `timeout_s` seconds. The memory then stays mapped on purpose, as the
        kernel may still write to it; a later `close` tries again. An array that still shows the memory keeps it mapped.
        """
        if not self._pool.close(timeout_s):
            stats = self._pool.stats()
            log.warning(
                "an arena of %d bytes stays mapped: %d bytes leased, %d in quarantine after %.1f s",
                self.size_bytes,
                stats.leased_bytes,
                stats.quarantined_bytes,
                timeout_s,
            )
            return False
        with self._closing:
            if self._memory is not None:
                self._memory.unpin()
                self._memory = None
                self._pool.forget_memory()
        return True

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout_s=30.0)


def _check(size_bytes: int, slot_bytes: int, huge_pages: str, pin: str) -> None:
    if size_bytes <= 0:
        raise ArgumentError("an arena needs at least one byte", size_bytes=size_bytes)
    if slot_bytes <= 0 or slot_bytes % ALIGNMENT:
        raise ArgumentError(f"slots must be a multiple of {ALIGNMENT} bytes", slot_bytes=slot_bytes)
    for name, mode in (("huge_pages", huge_pages), ("pin", pin)):
        if mode not in ("auto", "off"):
            raise ArgumentError(f'{name} must be "auto" or "off"', given=mode)


def _pin(memory: HostMemory, pin: Mode, cuda_driver: Any | None) -> str | None:
    if pin == "off":
        return "not pinned: not asked for"
    return memory.pin(cuda_driver if cuda_driver is not None else pinning.load_driver())

"""An arena: one big aligned allocation, pre-faulted, on the best pages that are granted, handed out in leases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError, StoreClosedError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory import numa
from gdsstore.memory.cuda import load_driver
from gdsstore.memory.hugepages import PageGrant, PageKind, Place, map_ladder
from gdsstore.memory.lease import ArenaStats, Lease
from gdsstore.memory.leased import LeasedMemory, whole_slots
from gdsstore.memory.mapping import HostMemory
from gdsstore.memory.placement import Placement
from gdsstore.waiting import Deadline

__all__ = ["Arena", "ArenaStats", "Grant", "Lease", "Mode"]

Mode = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class Grant:
    """What an arena was given. `notes` says of each better thing why it was not."""

    pages: PageKind
    page_bytes: int
    numa_node: int | None  # None: not bound, or not where it was asked for
    pinned: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wishes:
    """How an arena's memory is to be."""

    huge_pages: bool
    prefault: bool
    deadline: Deadline
    place: Place
    sysfs: Path


class Arena(LeasedMemory):
    """Host memory for staging. `address` (bytes, a multiple of 2 MiB) never changes.

    An array that still shows the memory keeps it mapped after `close`.
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
        size_bytes = whole_slots(size_bytes, slot_bytes)
        for name, mode in (("huge_pages", huge_pages), ("pin", pin)):
            if mode not in ("auto", "off"):
                raise ArgumentError(f'{name} must be "auto" or "off"', given=mode)
        placement = Placement(numa_node, sysfs)
        wishes = Wishes(huge_pages == "auto", prefault, Deadline(timeout_s), placement.place, sysfs)
        pages = self._map(size_bytes, wishes)
        memory = HostMemory(pages.address, pages.length)
        not_pinned = _pin(memory, pin, cuda_driver)
        super().__init__(memory, size_bytes, slot_bytes)
        self._memory: HostMemory | None = memory
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

    def _map(self, size_bytes: int, wishes: Wishes) -> PageGrant:
        return map_ladder(
            size_bytes,
            huge_pages=wishes.huge_pages,
            prefault=wishes.prefault,
            deadline=wishes.deadline,
            place=wishes.place,
            sysfs=wishes.sysfs,
        )

    def _give_back(self) -> bool:
        if self._memory is not None:
            self._memory.unpin()
            self._memory = None
        return True


def _pin(memory: HostMemory, pin: Mode, cuda_driver: Any | None) -> str | None:
    if pin == "off":
        return "not pinned: not asked for"
    return memory.pin(cuda_driver if cuda_driver is not None else load_driver())

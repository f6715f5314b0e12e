"""A chunk under way, and what moving it asks of the memory that its pages are in."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op, Transfer
from gdsstore.memory.lease import Lease
from gdsstore.memory.views import PageMemory
from gdsstore.transfer.plan import ChunkPlan
from gdsstore.transfer.policy_terms import TransferClass
from gdsstore.transfer.results import Statuses, Unfinished
from gdsstore.waiting import Deadline

U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where n pages lie on the drives; arrays of shape (n,)."""

    segment: npt.NDArray[np.uint32]
    volume: npt.NDArray[np.int64]
    file_offset: npt.NDArray[np.int64]

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> Placed:
        return Placed(self.segment[index], self.volume[index], self.file_offset[index])


class ChunkGrant(Protocol):
    """A chunk's share of its volumes."""

    @property
    def cls(self) -> TransferClass:
        """What the chunk is for."""

    def moved(self) -> None:
        """The chunk has moved whole, at the first try."""

    def done(self) -> None:
        """The chunk has ended. Idempotent."""

    def late(self) -> None:
        """It ran into its deadline, and the engine has not let go of it. `done` follows when it has."""


@dataclass(slots=True)
class Flight:
    """A chunk under way. `address` and `length` are what the drive sees: in place, or in the staging lease."""

    op: Op
    memory: PageMemory
    record_bytes: int
    staged: Ints  # pages that go through the lease
    address: U64
    length: npt.NDArray[np.int64]
    fd: npt.NDArray[np.int32]
    volume: npt.NDArray[np.int64]
    file_offset: npt.NDArray[np.int64]
    status: Statuses
    plan: ChunkPlan
    lease: Lease | None
    unpin: Callable[[], None]
    transfers: list[Transfer] = field(default_factory=list)
    device_work: list[Unfinished] = field(default_factory=list)  # kernels on the pages' device
    grant: ChunkGrant | None = None  # of the scheduler's
    started: float = field(default_factory=time.monotonic)
    end_io: Callable[[], None] = lambda: None  # for the profiler: see observe.nvtx
    undecided: tuple[int, ...] = ()  # volumes that were late, by less than what says that they hang
    first_block: int = 0  # of the part of its record that is moved, where it is not the whole
    scattered: bool = False  # the staged pages of a READ are where they belong
    sums: U64 | None = None  # raw checksums of the records, where they are known; shape (n,)
    damaged: npt.NDArray[np.bool_] | None = (
        None  # of KnownMemory: pages that are not what they should be; shape (n,)
    )

    @property
    def cls(self) -> str:
        """What its bytes are counted for: the name of a TransferClass in small letters."""
        return (TransferClass.MAINTENANCE if self.grant is None else self.grant.cls).name.lower()

    @property
    def unfinished(self) -> list[Unfinished]:
        """What may still use the pages' memory or the lease."""
        return [work for work in (*self.transfers, *self.device_work) if not work.done]


class Side(ABC):
    """The memory that pages are in (the host's, or a device's) and what is done to their bytes there. Thread-safe.

    What waits raises DeadlineError where it did not end in time (it is then in the flight's `unfinished`), and EngineError
    where the device failed.
    """

    @abstractmethod
    def in_place(self, memory: PageMemory, record_bytes: int) -> npt.NDArray[np.bool_]:
        """Which pages the drive reads and writes where they are; the others go through a lease. Shape (n,)."""

    @abstractmethod
    def lease(self, nbytes: int, timeout_s: float) -> Lease:
        """Staging memory. Raises DeadlineError where there was no room in time."""

    @abstractmethod
    def prepare(self, flight: Flight, deadline: Deadline) -> None:
        """Before the drive comes: wait until the pages' memory may be used; of a WRITE, fill the lease and its padding."""

    @abstractmethod
    def raw_checksums(self, flight: Flight, pages: Ints, deadline: Deadline) -> U64:
        """Raw checksums of some of the chunk's pages, from the memory that the drive saw. Shape (len(pages),).

        May copy staged pages of a READ to where they belong in the same pass.
        """

    @abstractmethod
    def bring(
        self,
        address: U64,
        memory: PageMemory,
        record_bytes: int,
        deadline: Deadline,
        sums: U64 | None = None,
        first_block: int = 0,
    ) -> Unfinished | None:
        """Copy n whole records of host memory, at `address` (n,), into the pages of `memory`. Small enough for the staging.

        `sums`, uint64 (n,), is filled with the raw checksums of what has arrived, which records that others can write while they
        are copied may not have been before. `first_block`: where these are parts of records, the block that they begin with. Raises
        DeadlineError, with nothing under way. Returns what still writes where the deadline passed in the middle of it; `sums` are
        nothing then.
        """

    @abstractmethod
    def scatter(self, flight: Flight, pages: Ints, deadline: Deadline) -> None:
        """Copy those of `pages` that were staged into the caller's memory, where `raw_checksums` has not."""


def first_blocks(length: npt.NDArray[np.int64], block: int) -> npt.NDArray[np.int64]:
    """For each piece, the index in its record of the block that it begins with. Shape (n, k)."""
    return np.asarray((np.cumsum(length, axis=1) - length) // block, np.int64)

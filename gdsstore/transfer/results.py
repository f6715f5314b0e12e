"""What became of each page of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class PageStatus(IntEnum):
    """A page's outcome. Below 10: it is where it should be. From 10 on a miss, from 20 on a failed save."""

    PENDING = 0  # never in a result
    SAVED = 1
    ALREADY_THERE = 2
    LOADED = 3  # and verified, unless verification was switched off
    MISS_ABSENT = 10
    MISS_CHECKSUM = 11  # the bytes on the drive are damaged; the page was dropped
    MISS_RECLAIMED = 12  # its segment was reclaimed while it was being read
    MISS_IO = 13  # the drive answered with an error, or with fewer bytes
    MISS_DEADLINE = 14
    MISS_SEGMENT = 15  # its segment's file is missing or cannot be opened
    MISS_VOLUME_SICK = 16  # its drive does not answer, or only with errors; it is tried again in a while
    MISS_BUSY = 17  # too many loads were waiting
    MISS_CANCELLED = 18
    FAILED_NO_SPACE = 20
    FAILED_IO = 21
    FAILED_DEADLINE = 22
    FAILED_VOLUME_SICK = 23  # no drive answers
    FAILED_BUSY = 24  # too many saves were waiting
    FAILED_CANCELLED = 25
    FAILED_DROPPED = 26  # it waited longer than `offload_budget_s`
    FAILED_CHECKSUM = 27  # its bytes changed in the host cache before they were written; it was dropped


Statuses = npt.NDArray[np.uint8]


class Unfinished(Protocol):
    """Something that may still use memory: a transfer, or work on a device."""

    @property
    def done(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallResult:
    """One status a key, in the order of the keys. `status`: uint8 (n,), values of PageStatus."""

    status: Statuses
    unfinished: Sequence[Unfinished] = field(default=(), repr=False)

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Which pages are where they should be: saved, already there, or loaded. Shape (n,)."""
        return np.less(self.status, PageStatus.MISS_ABSENT)

    @property
    def all_ok(self) -> bool:
        return bool(self.ok.all())

    def count(self, status: PageStatus) -> int:
        return int(np.count_nonzero(self.status == status))

    def reasons(self) -> dict[str, int]:
        """How many pages had each outcome, by name."""
        codes, counts = np.unique(self.status, return_counts=True)
        return {
            PageStatus(code).name: int(n) for code, n in zip(codes.tolist(), counts.tolist(), strict=True)
        }

    @property
    def memory_in_use(self) -> bool:
        """Whether the drive may still read or write the caller's memory: only after a page ran into its deadline.

        While this is true, keep that memory alive and use it for nothing else.
        """
        return any(not work.done for work in self.unfinished)


class SaveResult(CallResult):
    """Statuses: SAVED, ALREADY_THERE, FAILED_*."""

    @property
    def damaged(self) -> npt.NDArray[np.bool_]:
        """Which pages were not any more what they should be, and so were not written. Shape (n,)."""
        return np.equal(self.status, PageStatus.FAILED_CHECKSUM)


class LoadResult(CallResult):
    """Statuses: LOADED, MISS_*. The memory of a page that missed holds nothing to rely on."""

    @property
    def loaded(self) -> int:
        """How many pages were loaded."""
        return self.count(PageStatus.LOADED)

    @property
    def prefix(self) -> int:
        """How many pages from the start were loaded without a gap."""
        return len(self.status) if self.all_ok else int(self.ok.argmin())

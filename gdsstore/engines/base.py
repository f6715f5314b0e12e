"""The contract of an engine: moves byte ranges between memory and files, and knows nothing of pages.

Rules that every engine keeps:

- `submit` starts a whole plan with one call and does not wait for the drive. The caller keeps the memory and the file
  descriptors alive until the transfer is `done`.
- A result is per range: bytes moved and errno. A range counts as moved only when its full byte count was seen; what was not
  looked at is never reported as moved. A short read or write is reported as what it is (`moved < length`, `errno == 0`).
- `Transfer.wait` always returns by its deadline. A transfer that is not done then may still write into the memory: whoever
  owns the memory quarantines it until `done` is true. Nothing an engine does releases memory.
- Engines are thread-safe: several threads may submit and wait at the same time, each on its own transfer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


class Op(Enum):
    READ = "read"  # file -> memory
    WRITE = "write"  # memory -> file


@dataclass(frozen=True, slots=True)
class RangePlan:
    """N byte ranges, as four arrays of length N. Ranges must not overlap in memory (READ) or in a file (WRITE).

    `label`: what they are for, in the caller's words. Engines that count bytes count them by it; else it means nothing to them.
    """

    fd: I32  # file descriptors, each attached to the engine
    file_offset: I64  # bytes
    address: U64  # memory addresses
    length: I64  # bytes, > 0
    label: str = ""

    def __len__(self) -> int:
        return len(self.fd)

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())

    def take(self, index: npt.NDArray[np.intp] | slice) -> RangePlan:
        """The plan of some of the ranges."""
        return RangePlan(
            self.fd[index], self.file_offset[index], self.address[index], self.length[index], self.label
        )


@dataclass(frozen=True, slots=True)
class RangeResults:
    """One result a range, in the plan's order."""

    moved: I64  # bytes
    errno: I32  # 0: no error. errno.ETIMEDOUT where the deadline passed first

    def complete(self, plan: RangePlan) -> npt.NDArray[np.bool_]:
        """Which ranges moved all their bytes without an error."""
        whole: npt.NDArray[np.bool_] = (self.errno == 0) & (self.moved == plan.length)
        return whole


class Transfer(ABC):
    """A plan under way. Used by one thread at a time."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the engine has let go of the memory. Polls; never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float) -> RangeResults:
        """Wait for the end, at most `timeout_s` seconds; then ranges that have not ended have errno ETIMEDOUT."""


class Engine(ABC):
    """Moves ranges between host or device memory and attached files."""

    name: str

    @abstractmethod
    def attach(self, fd: int, size: int) -> None:
        """Make an open file of `size` bytes known. An fd is attached once and detached before it is closed."""

    @abstractmethod
    def detach(self, fd: int) -> None:
        """Forget a file. No transfer on it may be under way. Unknown fds are ignored."""

    @abstractmethod
    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        """Start a plan. Raises EngineError only if nothing was started; failures of ranges are in the results."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, at most `timeout_s`, and free everything. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout_s=30.0)

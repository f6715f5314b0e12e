"""What a store sees of a node's shared host cache: records that another process holds in memory mapped here too."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.observe.activity import Activity
from gdsstore.waiting import Deadline

Mask = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class NodeLease(Protocol):
    """Records that the daemon keeps in place until `close`; arrays of shape (n,), in the order of the keys.

    Nothing here is trusted: another process can write the memory at any time, so whoever copies a record verifies the copy. The
    memory itself stays mapped, and safe to read, until `close`, whatever becomes of the daemon.
    """

    @property
    def found(self) -> Mask:
        """Which records are there."""

    @property
    def address(self) -> U64:
        """Where each record begins in this process's memory; 0 where not found. Aligned to 4 KiB, and readable only."""

    @property
    def record_bytes(self) -> int:
        """How many bytes are mapped at each address: what the daemon says that a record has, not what it should have."""

    def close(self) -> None:
        """Give the records back. Idempotent; may come from another thread; never raises."""


class NodeTier(Protocol):
    """The daemon of a node, as its clients see it. Thread-safe. No call raises for a daemon that is away, slow or broken."""

    def lease(self, namespace: bytes, keys: U8, deadline: Deadline) -> NodeLease | None:
        """The records of these keys. `namespace`: 16 bytes; `keys`: uint8 (n, 32). None: no daemon now, or too late."""

    def prefetch(self, namespace: bytes, keys: U8, deadline_s: float) -> bool:
        """Ask the daemon to bring these keys into its cache within `deadline_s` seconds. False: it was not taken."""

    def report(self, activity: Activity) -> bool:
        """Tell it what this process did so far. Whether it took that; at most 50 ms, and for no data path."""

    def close(self) -> None:
        """Let go of the daemon and, once no lease is open, of its memory. Idempotent."""

"""Records of the node's shared host cache that the daemon keeps in place for one load, and what our catalog says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.keys import index_keys
from gdsstore.checksum.definition import finish, seeds
from gdsstore.drive_pages import Call, DrivePages
from gdsstore.tiers.remote import NodeLease, NodeTier
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.store_core import StoreCore

U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.intp]
LEASE_S = 0.25  # a daemon that takes longer to answer is slower than the drive
# In one request: the daemon needs a few milliseconds for them, in which nobody else is answered. With the most that a message
# holds, no answer would come in time.
BATCH_KEYS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Borrowed:
    """Records that the daemon says are there; arrays of shape (n,). `at`: the positions of their pages in the call."""

    leases: Sequence[NodeLease]
    at: Ints
    address: U64
    seed: U64
    checksum: U64

    def are_right(self, sums: U64, part: slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Whether bytes of so many of the records, by their raw checksums, are what the catalog says. Shape of `sums`."""
        return np.asarray(finish(sums, self.seed[part]) == self.checksum[part], np.bool_)

    def close(self) -> None:
        """Give the records back."""
        for lease in self.leases:
            lease.close()


def borrow(store: StoreCore, drive: DrivePages, node: NodeTier, call: Call) -> Borrowed | None:
    """Those of a call's pages that the daemon has, of those that our catalog has; None where there is none.

    The daemon is asked for a batch after the other, in LEASE_S at most: of a large call, what it did not get to is not borrowed.
    """
    index, tag = index_keys(call.keys, drive.digest)
    with contextlib.ExitStack() as undo, store.using():
        where, rows = store.catalog.locate(index, tag)
        known = drive.place(where, rows)[0]
        leases: list[NodeLease] = []
        at, address = [known[:0]], [np.zeros(0, np.uint64)]
        deadline = Deadline(min(LEASE_S, call.deadline.left_s))
        for first in range(0, len(known), BATCH_KEYS):
            part = known[first : first + BATCH_KEYS]
            lease = None if deadline.passed else node.lease(drive.digest, call.keys[part], deadline)
            if lease is None:
                break
            undo.callback(lease.close)
            leases.append(lease)
            if lease.record_bytes != drive.record_bytes:
                break  # nothing to copy; or there may be less than we would read
            found = np.flatnonzero(lease.found)
            at.append(part[found])
            address.append(lease.address[found])
        mine = np.concatenate(at)
        if len(mine) == 0:
            return None
        store.heat.touch(where.segment[mine], where.slot[mine])
        payload = where.payload_bytes[mine].astype(np.int64)
        seed = seeds(call.keys[mine], drive.digest, where.generation[mine], payload)
        undo.pop_all()
        return Borrowed(leases, mine, np.concatenate(address), seed, where.checksum[mine])

"""The daemon's side of a shared host cache: records of it, lent to processes that have its memory mapped."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.keys import index_keys
from gdsstore.checksum.definition import finish, seeds
from gdsstore.errors import DeadlineError
from gdsstore.tiers.cached import CachedNamespace
from gdsstore.tiers.holds import Loan
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.drive_pages import DrivePages
    from gdsstore.store_core import StoreCore

log = logging.getLogger("gdsstore.store")

LENT_SHARE = 0.5  # of the host cache, over all loans: the rest stays free to bring other pages into
OWNER_SHARE = 0.25  # of it, to one process: one that hangs does not keep the others from borrowing
DROP_S = 1.0


class Lent:
    """Records that stay where they are until `release`; arrays of shape (n,), in the order of the keys.

    `found`: which. `offset`: bytes from the beginning of `Store.shared_memory()`, int64, a multiple of 4 KiB, 0 where not found;
    each has `record_bytes` bytes. Any thread may release it; a store that closes waits for that.
    """

    __slots__ = ("_loan", "found", "offset", "record_bytes")

    def __init__(self, loan: Loan | None, count: int, record_bytes: int) -> None:
        """None: nothing is lent."""
        self._loan = loan
        self.found: npt.NDArray[np.bool_] = np.zeros(count, np.bool_) if loan is None else loan.found
        self.offset: npt.NDArray[np.int64] = np.zeros(count, np.int64) if loan is None else loan.offset
        self.record_bytes = record_bytes

    def release(self) -> None:
        """Give the records back. Idempotent."""
        if self._loan is not None:
            self._loan.release()


def lend(
    store: StoreCore, drive: DrivePages, cached: CachedNamespace, keys: npt.NDArray[np.uint8], owner: str
) -> Lent:
    """Lend `owner` those of these records, uint8 (n, 32), that are on the drives too, and the same there.

    Whoever borrows them can then check them by the catalog. What was saved anew since it came into the cache is dropped from it.
    """
    size = store.config.host_cache
    loan = cached.lend(keys, owner, int(OWNER_SHARE * size), int(LENT_SHARE * size))
    try:
        index, tag = index_keys(keys, drive.digest)
        with store.using():
            where = store.catalog.resolve(index, tag)
        seed = seeds(keys, drive.digest, where.generation, where.payload_bytes.astype(np.int64))
        same = where.found & (finish(loan.raw, seed) == where.checksum)
        other = loan.found & where.found & ~same
        loan.keep(same)
        if other.any():
            _drop(cached, keys[other])
    except BaseException:
        loan.release()
        raise
    return Lent(loan, len(keys), drive.record_bytes)


def _drop(cached: CachedNamespace, keys: npt.NDArray[np.uint8]) -> None:
    try:
        cached.drop(keys, Deadline(DROP_S))
    except DeadlineError as error:  # dropped all the same
        log.warning("records of the host cache that others have saved anew: %s", error)

"""Pages of a layer-wise load that are in the node's shared host cache: looked at first, then brought layer by layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.host import raw_sums
from gdsstore.drive_pages import Call
from gdsstore.layout import PageLayout
from gdsstore.remote_borrowed import Borrowed
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.results import PageStatus, Statuses
from gdsstore.warm_layers import WarmLayers

Ints = npt.NDArray[np.intp]
SLICE_BYTES = 4 << 20  # summed up between two looks at the deadline


class RemoteLayers:
    """For one load, in one thread.

    A checksum covers a whole record, and a layer that was told of cannot be taken back. So each record is looked at where it lies
    before any layer is told of, and what is wrong is left to the drive; the copies are summed up once more, since others can write
    to that memory meanwhile. Pages of a device are brought whole before, and are looked at where they arrived.
    """

    def __init__(self, call: Call, borrowed: Borrowed, layout: PageLayout, mover: Mover) -> None:
        self._call, self._borrowed, self._layout = call, borrowed, layout
        self._sums = np.zeros(len(borrowed.at), np.uint64)
        self.layers = WarmLayers(
            call.memory, borrowed.at, borrowed.address, layout, mover, call.deadline, sums=self._sums
        )
        self.refused = 0  # pages with bytes that are not those of the catalog

    def look(self) -> Ints:
        """Which pages of the call, by their positions, the drive is to read."""
        status = self.layers.status
        if self._call.moving is None:
            self._sum_up(status)
        else:  # not beside the reads: who holds staging memory for these must not wait for more of it
            self.layers.bring(0, self._layout.layers)
            self._refuse(status, self._sums)
        mask = np.ones(len(self._call), np.bool_)
        mask[self.layers.at[(status == PageStatus.PENDING) | (status == PageStatus.MISS_DEADLINE)]] = False
        return np.flatnonzero(mask)

    def judge(self, status: Statuses, read: Ints) -> Statuses:
        """When all layers were told of: fill in the `status` of the pages that the drive did not `read`. Returns these."""
        self._refuse(self.layers.status, self._sums)
        mine = self.layers.status.copy()
        mine[mine == PageStatus.PENDING] = PageStatus.LOADED
        own = ~np.isin(self.layers.at, read)
        status[self.layers.at[own]] = mine[own]
        return mine[own]

    def _sum_up(self, status: Statuses) -> None:
        record_bytes = self._layout.record_bytes
        step = max(1, SLICE_BYTES // record_bytes)
        sums = np.zeros(len(status), np.uint64)
        for first in range(0, len(status), step):
            if self._call.deadline.passed:
                status[first:] = PageStatus.MISS_DEADLINE
                break
            address = self._borrowed.address[first : first + step]
            n = len(address)
            sums[first : first + n] = raw_sums(
                address, np.full(n, record_bytes, np.int64), np.zeros(n, np.int64)
            )
        self._refuse(status, sums)

    def _refuse(self, status: Statuses, sums: npt.NDArray[np.uint64]) -> None:
        wrong = (status == PageStatus.PENDING) & ~self._borrowed.are_right(sums)
        status[wrong] = PageStatus.MISS_RECLAIMED
        self.refused += int(np.count_nonzero(wrong))

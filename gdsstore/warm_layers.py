"""Pages of a layer-wise load that are in a host cache: brought layer by layer, while the drives read the others."""

from __future__ import annotations

import logging

import numpy as np

from gdsstore.errors import DeadlineError, EngineError
from gdsstore.layout import ALIGNMENT, ByteRange, PageLayout
from gdsstore.memory.views import PageMemory
from gdsstore.transfer.flight import U64, Ints
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.layered_cuts import PageCuts, blocks_of, take_blocks
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.results import PageStatus, Unfinished
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.store")

SLICE_BYTES = 4 << 20  # in one go, into the staging memory of a device


class WarmLayers:
    """For one load, in one thread; arrays of shape (n,). `at`: the positions in the call of the pages that are there. `status`:
    what became of them; PENDING while all is well."""

    def __init__(
        self,
        memory: PageMemory,
        at: Ints,
        address: U64,
        layout: PageLayout,
        mover: Mover,
        deadline: Deadline,
        *,
        sums: U64 | None = None,
    ) -> None:
        """`memory`: of the call. `address`: where the records of the pages `at` begin, uint64 (n,), which nobody moves before
        `unfinished` is done. `sums`, zeros, uint64 (n,): become the raw checksums of what has arrived of each; None: not needed."""
        self.at = at
        self.status = np.full(len(self.at), PageStatus.PENDING, np.uint8)
        self.unfinished: list[Unfinished] = []
        self._address, self._sums = address, sums
        self._layout, self._mover, self._deadline = layout, mover, deadline
        self._cuts, self._left = PageCuts(memory.take(self.at)), blocks_of(layout)

    def bring(self, first: int, last: int) -> Ints:
        """Copy layers `first` to `last` to where they belong; the pages that are good so far, by their positions in the call."""
        for part in take_blocks(self._layout, LayerGroup(first, last), self._left):
            step = max(1, SLICE_BYTES // part.length)
            good = np.flatnonzero(self.status == PageStatus.PENDING)
            for start in range(0, len(good), step):
                pages = good[start : start + step]
                self.status[pages] = self._copy(pages, part)
        return np.asarray(self.at[self.status == PageStatus.PENDING], np.intp)

    def _copy(self, pages: Ints, part: ByteRange) -> PageStatus:
        address = self._address[pages] + np.uint64(part.offset)
        sums = None if self._sums is None else np.zeros(len(pages), np.uint64)
        try:
            late = self._mover.bring(
                address,
                self._cuts.take(pages, part),
                part.length,
                self._deadline,
                sums,
                part.offset // ALIGNMENT,
            )
        except DeadlineError:
            return PageStatus.MISS_DEADLINE
        except EngineError as error:
            log.error("layers of the host cache could not be put in place: %s", error)
            return PageStatus.MISS_IO
        except Exception:  # the forward waits for these layers, and must not take them for good
            log.exception("layers of the host cache could not be put in place")
            return PageStatus.MISS_IO
        if late is not None:
            self.unfinished.append(late)
            return PageStatus.MISS_DEADLINE
        if self._sums is not None and sums is not None:
            self._sums[pages] += sums
        return PageStatus.PENDING

"""Pages of one namespace in the node's shared host cache, in front of the drives.

The daemon says where records lie in memory that is mapped here. What they should be is said by our own catalog: each is copied,
and the copy is checked as if it had come from the drive. What is not right, or not there, is read from the drive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.drive_pages import Call, DrivePages
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.layered_calls import LayeredLoad
from gdsstore.layout import PageLayout
from gdsstore.remote_borrowed import BATCH_KEYS, Borrowed, borrow
from gdsstore.remote_layers import RemoteLayers
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.results import LoadResult, PageStatus, Statuses, Unfinished
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.store_core import StoreCore

log = logging.getLogger("gdsstore.store")

U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.intp]
SLICE_BYTES = 4 << 20  # of the cache, between two looks at the drive
FROM_SHARED = "LOADED_FROM_SHARED"  # of those LOADED: told apart in the counters


class RemotePages:
    """Thread-safe; lives as long as its store is open."""

    def __init__(self, store: StoreCore, drive: DrivePages) -> None:
        self._store, self._drive = store, drive
        self._lock = threading.Lock()
        self._late: list[tuple[Borrowed, list[Unfinished]]] = []  # records that a device still copies from

    def load(self, call: Call) -> LoadResult:
        """From the shared cache and the drives at the same time; without a daemon, from the drives."""
        borrowed = self._borrow(call)
        if borrowed is None:
            return self._drive.load(call)
        status = np.full(len(call), PageStatus.PENDING, np.uint8)
        unfinished: list[Unfinished] = []
        copies: list[Unfinished] = []
        try:
            mover = self._drive.mover(call, Op.READ, len(borrowed.at))
            copying = self._copy(call, mover, borrowed, status, copies)
            mask = np.ones(len(call), np.bool_)
            mask[borrowed.at] = False
            if call.moving is not None:
                # Not beside the reads: who holds staging memory for these must not wait for more of it.
                for _ in copying:
                    pass
            self._read(call, np.flatnonzero(mask), copying, status, unfinished)
            for _ in copying:
                pass
        finally:
            self._give_back(borrowed, copies)
        mine = status[borrowed.at]
        late = int(np.count_nonzero(mine == PageStatus.MISS_DEADLINE))
        if late:
            self._drive.count({PageStatus.MISS_DEADLINE.name: late})
        self._read(call, borrowed.at[mine == PageStatus.PENDING], None, status, unfinished)
        return LoadResult(status, [*unfinished, *copies])

    def load_layers(self, call: Call, layered: LayeredLoad, layout: PageLayout) -> LoadResult:
        """As `load`, layer by layer. A record that somebody wrote to after it was found to be right is a miss."""
        borrowed = self._borrow(call)
        if borrowed is None:
            return self._drive.load(call, layered=layered)
        status = np.full(len(call), PageStatus.PENDING, np.uint8)
        unfinished: list[Unfinished] = []
        copies: list[Unfinished] = []
        try:
            mover = self._drive.mover(call, Op.READ, len(borrowed.at))
            shared = RemoteLayers(call, borrowed, layout, mover)
            copies = shared.layers.unfinished
            rest = shared.look()
            layered.beside(shared.layers, rest)
            try:
                self._read(call, rest, None, status, unfinished, layered)
            finally:
                layered.tell_rest()  # while the records are ours, whatever the drives' part has come to
            found = shared.judge(status, rest)
        finally:
            self._give_back(borrowed, copies)
        right = int(np.count_nonzero(found == PageStatus.LOADED))
        self._drive.count({**LoadResult(found).reasons(), FROM_SHARED: right})
        self._store.counters.add("shared_pages_refused", shared.refused)
        return LoadResult(status, [*unfinished, *copies])

    def _read(
        self,
        call: Call,
        pages: Ints,
        meanwhile: Iterator[None] | None,
        status: Statuses,
        unfinished: list[Unfinished],
        layered: LayeredLoad | None = None,
    ) -> None:
        if len(pages):
            result = self._drive.load(call.take(pages), None, meanwhile, layered=layered)
            status[pages] = result.status
            unfinished += result.unfinished

    def _borrow(self, call: Call) -> Borrowed | None:
        self.sweep()
        node = self._store.node
        return None if node is None or len(call) == 0 else borrow(self._store, self._drive, node, call)

    def _copy(
        self, call: Call, mover: Mover, borrowed: Borrowed, status: Statuses, copies: list[Unfinished]
    ) -> Iterator[None]:
        """Copy records to where they belong, a slice at a time, and check what has arrived. What is not right stays PENDING."""
        record_bytes = self._drive.record_bytes
        step = max(1, SLICE_BYTES // record_bytes)
        for first in range(0, len(borrowed.at), step):
            part = slice(first, first + step)
            at, sums = borrowed.at[part], np.zeros(len(borrowed.at[part]), np.uint64)
            try:
                late = mover.bring(
                    borrowed.address[part], call.memory.take(at), record_bytes, call.deadline, sums
                )
            except DeadlineError:
                status[borrowed.at[first:]] = PageStatus.MISS_DEADLINE
                return
            except EngineError as error:
                log.error("pages of the shared host cache could not be put in place: %s", error)
                return
            if late is not None:
                copies.append(late)
                status[borrowed.at[first:]] = PageStatus.MISS_DEADLINE
                return
            right = borrowed.are_right(sums, part)
            status[at[right]] = PageStatus.LOADED
            self._count(int(np.count_nonzero(right)), len(at))
            yield

    def _count(self, right: int, copied: int) -> None:
        self._drive.count({PageStatus.LOADED.name: right, FROM_SHARED: right})
        self._store.counters.add("shared_pages_refused", copied - right)

    def _give_back(self, borrowed: Borrowed, copies: list[Unfinished]) -> None:
        if all(copy.done for copy in copies):
            borrowed.close()
            return
        with self._lock:
            self._late.append((borrowed, copies))

    def sweep(self) -> None:
        """Give back what copies that were late have let go of."""
        if not self._late:
            return
        with self._lock:
            over = [each for each in self._late if all(copy.done for copy in each[1])]
            self._late = [each for each in self._late if each not in over]
        for borrowed, _ in over:
            borrowed.close()

    def prefetch(self, keys: npt.NDArray[np.uint8], deadline: Deadline) -> LoadResult:
        """Ask the daemon to bring pages into its cache. It does not say which come, or when: the result has MISS_ABSENT for all."""
        node, left_s, taken = self._store.node, deadline.left_s, 0
        while node is not None and taken < len(keys) and not deadline.passed:
            batch = keys[taken : taken + BATCH_KEYS]
            if not node.prefetch(self._drive.digest, batch, left_s):
                break
            taken += len(batch)
        self._store.counters.add("shared_prefetch_asked", taken)
        self._store.counters.add("shared_prefetch_refused", len(keys) - taken)
        return LoadResult(np.full(len(keys), PageStatus.MISS_ABSENT, np.uint8))

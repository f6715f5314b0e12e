"""A namespace of an open store: the calls that look up, save, load and delete its pages."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.keys import index_keys
from gdsstore.catalog.lookup import Places
from gdsstore.catalog.lost import NO_FILE
from gdsstore.catalog.records import Locations, SegmentRow, SegmentState
from gdsstore.damage import drop_lost_segments, report_damage
from gdsstore.engines.base import Op
from gdsstore.errors import GdsStoreError, VolumeError
from gdsstore.memory.device_views import describe_device, on_device
from gdsstore.memory.views import PageMemory, Pages, describe
from gdsstore.namespace import Keys, Namespace, as_key_array
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.flight import Placed
from gdsstore.transfer.load import LoadJob, load
from gdsstore.transfer.policy_terms import State, TransferClass
from gdsstore.transfer.results import LoadResult, PageStatus, SaveResult
from gdsstore.transfer.save import SaveJob
from gdsstore.volume.format import Geometry
from gdsstore.volume.tombstones import bury
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.device_moving import DeviceMoving
    from gdsstore.store import Store

log = logging.getLogger("gdsstore.store")

# What becomes of the pages of a call that was never begun.
UNSTARTED_LOAD = {State.EXPIRED: PageStatus.MISS_DEADLINE, State.REFUSED: PageStatus.MISS_BUSY}
UNSTARTED_SAVE = {
    State.EXPIRED: PageStatus.FAILED_DEADLINE,
    State.REFUSED: PageStatus.FAILED_BUSY,
    State.DROPPED: PageStatus.FAILED_DROPPED,
}

T = TypeVar("T")


class BoundNamespace:
    """Pages of one namespace. Made by `Store.namespace`; thread-safe; lives as long as its store is open."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self.namespace = namespace
        self.digest = namespace.digest
        self._page_bytes = namespace.layout.page_bytes
        self._record_bytes = namespace.layout.record_bytes
        self._geometry = Geometry.of(store.segment_bytes, self._record_bytes)

    # --- looking up: memory only, microseconds ---

    def lookup(self, keys: Keys) -> int:
        """How many pages from the start are stored, up to the first that is not.

        What was found stays loadable for `grace_s`. Raises ArgumentError for keys that are not 32 bytes.
        """
        found = self._present(keys, prefix=True).found
        return len(found) if found.all() else int(found.argmin())

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key whether its page is stored. Shape (n,)."""
        return self._present(keys, prefix=False).found

    def _present(self, keys: Keys, *, prefix: bool) -> Places:
        index, tag = index_keys(as_key_array(keys), self.digest)
        with self._store.using() as store:
            where = store.catalog.present(index, tag, prefix=prefix)
            segment, slot = where.segment[where.found], where.slot[where.found]
            store.heat.touch(segment, slot)
            store.heat.looked_up(segment)  # what is reported now stays loadable for the grace period
            store.counters.looked_up(len(segment), len(index) - len(segment))
            return where

    # --- moving ---

    def save(self, keys: Keys, pages: Pages, *, deadline_s: float | None = None) -> Future[SaveResult]:
        """Store n pages. The result says for each key SAVED, ALREADY_THERE or FAILED_*.

        `pages`: see `gdsstore.Pages`; each must have the layout's `page_bytes`. The memory must stay as it is until the future
        is done. When it is, the pages are visible (some of them earlier); a key that comes twice is saved once.
        Raises ArgumentError at once where keys and pages do not fit; then nothing was done.
        """
        array = as_key_array(keys)
        memory, moving = self._memory(pages, len(array), writable=False)
        deadline = self._deadline(deadline_s)
        return self._store.submit(
            lambda admission: self._save(array, memory, moving, deadline, admission),
            TransferClass.OFFLOAD,
            len(array) * self._record_bytes,
            deadline,
            lambda state: SaveResult(np.full(len(array), UNSTARTED_SAVE[state], np.uint8)),
        )

    def load(self, keys: Keys, pages: Pages, *, deadline_s: float | None = None) -> Future[LoadResult]:
        """Fetch n pages into the caller's memory. The result says for each key LOADED or MISS_* (and why).

        The memory of a page that missed holds nothing to rely on. Raises ArgumentError as `save` does.
        """
        array = as_key_array(keys)
        memory, moving = self._memory(pages, len(array), writable=True)
        deadline = self._deadline(deadline_s)
        return self._store.submit(
            lambda admission: self._load(array, memory, moving, deadline, admission),
            TransferClass.LOAD,
            len(array) * self._record_bytes,
            deadline,
            lambda state: LoadResult(np.full(len(array), UNSTARTED_LOAD[state], np.uint8)),
        )

    def in_place(self, pages: Pages, count: int) -> npt.NDArray[np.bool_]:
        """Which of `count` pages the drive reads and writes where they are, so that only their memory can be in use after a call;
        the others go through memory of the store's. Shape (n,). Raises ArgumentError as `load` does."""
        memory, moving = self._memory(pages, count, writable=False)
        route = (moving or self._store.moving()).route(Op.READ, self._record_bytes, count)
        return route.mover.in_place(memory, self._record_bytes)

    def _memory(self, pages: Pages, count: int, *, writable: bool) -> tuple[PageMemory, DeviceMoving | None]:
        """Where the pages of a call are, and what moves them; None: what moves host memory, which the call makes itself."""
        if not on_device(pages):
            return describe(pages, count, self._page_bytes, writable=writable), None
        found = describe_device(pages, count, self._page_bytes, writable=writable)
        moving = self._store.device_moving(found.device)
        moving.check_page(self._record_bytes)
        return moving.memory_of(found), moving

    def _deadline(self, deadline_s: float | None) -> Deadline:
        return Deadline(self._store.config.io_deadline_s if deadline_s is None else deadline_s)

    def _save(
        self,
        keys: npt.NDArray[np.uint8],
        memory: PageMemory,
        moving: DeviceMoving | None,
        deadline: Deadline,
        admission: Admission,
    ) -> SaveResult:
        index, tag = index_keys(keys, self.digest)
        status = np.full(len(keys), PageStatus.PENDING, np.uint8)
        with self._store.using() as store:
            where = store.catalog.resolve(index, tag)
            store.heat.touch(where.segment[where.found], where.slot[where.found])
            status[where.found] = PageStatus.ALREADY_THERE
            first, inverse = np.unique(keys.view("V32").reshape(-1), return_index=True, return_inverse=True)[
                1:
            ]
            fresh = np.zeros(len(keys), np.bool_)
            fresh[first] = True
            at = np.flatnonzero(fresh & ~where.found)
            job = SaveJob(at, keys[at], index[at], tag[at], self.digest, memory.take(at), self._record_bytes)
            result = SaveResult(status)
            if len(at):
                route = (moving or store.moving()).route(Op.WRITE, self._record_bytes, len(at))
                with route.timed(len(at) * self._record_bytes, status):
                    result = route.saver.save(job, status, deadline, admission)
            # A key that came again shares its first one's fate.
            again = np.flatnonzero(~fresh)
            fate = status[first[inverse[again]]]
            status[again] = np.where(fate == PageStatus.SAVED, PageStatus.ALREADY_THERE, fate)
            store.counters.outcome(result.reasons())
        return result

    def _load(
        self,
        keys: npt.NDArray[np.uint8],
        memory: PageMemory,
        moving: DeviceMoving | None,
        deadline: Deadline,
        admission: Admission,
    ) -> LoadResult:
        index, tag = index_keys(keys, self.digest)
        status = np.full(len(keys), PageStatus.MISS_ABSENT, np.uint8)
        with self._store.using() as store:
            where, rows = store.catalog.locate(index, tag)
            at, placed = self._place(where, rows)
            fit = admission.readable(placed.volume)
            status[at[~fit]] = PageStatus.MISS_VOLUME_SICK
            at, placed = at[fit], placed.take(fit)
            store.heat.touch(where.segment[at], where.slot[at])

            job = LoadJob(
                at, keys[at], self.digest, memory.take(at), _take(where, at), placed, self._record_bytes
            )

            def still_there(pages: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
                now, rows_now = store.catalog.locate(index[at[pages]], tag[at[pages]])
                good = self._place(now, rows_now)[0]
                same = np.zeros(len(pages), np.bool_)
                same[good] = (now.generation == job.where.generation[pages])[good]
                return same

            result = LoadResult(status)
            if len(at):
                route = (moving or store.moving()).route(Op.READ, self._record_bytes, len(at))
                with route.timed(len(at) * self._record_bytes, status):
                    result = load(
                        route.mover,
                        job,
                        status,
                        route.chunk_bytes,
                        store.config.verify,
                        still_there,
                        deadline,
                        admission,
                    )
            self._drop_damaged(index, where, status)
            store.counters.outcome(result.reasons())
        return result

    def _place(self, where: Locations, rows: dict[int, SegmentRow]) -> tuple[npt.NDArray[np.intp], Placed]:
        """Which pages can be read, and where they lie on the drives."""
        known = np.zeros(len(where.found), np.bool_)
        volume = np.zeros(len(where.found), np.int64)
        for segment_id, row in rows.items():
            mine = where.found & (where.segment == segment_id)
            usable = row.state is not SegmentState.LOST and row.slot_bytes == self._record_bytes
            known |= mine & (where.generation == row.generation) if usable else False
            volume[mine] = row.volume
        known &= where.payload_bytes == self._page_bytes
        at = np.flatnonzero(known)
        return at, Placed(
            where.segment[at], volume[at], self._geometry.slot_offset(where.slot[at].astype(np.int64))
        )

    def _drop_damaged(
        self, index: npt.NDArray[np.uint64], where: Locations, status: npt.NDArray[np.uint8]
    ) -> None:
        damaged = np.flatnonzero(status == PageStatus.MISS_CHECKSUM)
        gone = (status == PageStatus.MISS_SEGMENT) | (status == PageStatus.MISS_IO)
        try:
            if len(damaged):
                report_damage(self._store, where.segment[damaged], where.slot[damaged])
                self._remove(index[damaged], _take(where, damaged))
            if gone.any():
                drop_lost_segments(self._store, np.unique(where.segment[gone]).tolist())
        except GdsStoreError as error:  # a full drive, say: the loads that went well stay good
            log.error("damaged pages could not be dropped, and will miss again: %s", error)

    # --- deleting ---

    def delete(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Drop pages. Returns for each key whether there was one to drop. Their space comes back with their segment."""
        index, _tag = index_keys(as_key_array(keys), self.digest)
        with self._store.using() as store:
            return self._remove(index, store.catalog.resolve(index, _tag))

    def _remove(self, index: npt.NDArray[np.uint64], where: Locations) -> npt.NDArray[np.bool_]:
        store = self._store
        with store.catalog.write(pages=len(index)) as txn:
            gone = store.catalog.remove(txn, where, index)
            for segment_id in np.unique(where.segment[gone]).tolist():
                mine = gone & (where.segment == segment_id)
                row = store.catalog.segment(txn, segment_id)
                if row is not None and row.state is not SegmentState.LOST:
                    volume = store.volumes[row.volume]
                    slots = where.slot[mine]
                    try:
                        sequence = store.sequencer.take()
                        bury(volume, segment_id, self._geometry, row.generation, slots, store.uuid, sequence)
                    except VolumeError as error:
                        if (
                            error.context.get("errno") not in NO_FILE
                        ):  # without its file, no page can come back
                            raise
        return gone

    def clear(self) -> int:
        """Drop all pages of this namespace. Returns how many there were."""
        with self._store.using() as store:
            store.directory.describe_namespace(self.namespace)  # the mark is kept with it
            store.directory.mark_cleared(self.digest, store.sequencer.take())
            dropped = 0
            with store.catalog.read() as txn:
                rows = store.catalog.segments(txn)
            for row in rows:
                with store.catalog.write(pages=row.filled) as txn:
                    dropped += store.catalog.drop_pages(txn, row.segment_id, self.digest)
            return dropped


def _take(where: Locations, at: npt.NDArray[np.intp]) -> Locations:
    return Locations(
        where.found[at],
        where.segment[at],
        where.slot[at],
        where.generation[at],
        where.checksum[at],
        where.payload_bytes[at],
    )

"""Pages of one namespace on the drives: the work of loads, saves and deletes, for the thread that it is given to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.keys import index_keys
from gdsstore.catalog.lost import NO_FILE
from gdsstore.catalog.records import Locations, SegmentRow, SegmentState
from gdsstore.damage import drop_lost_segments, report_damage
from gdsstore.engines.base import Op
from gdsstore.errors import GdsStoreError, VolumeError
from gdsstore.layered_calls import LayeredLoad
from gdsstore.layered_saves import LayeredSave
from gdsstore.memory.views import PageMemory
from gdsstore.namespace import Identity
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.commit import SaveJob
from gdsstore.transfer.flight import Placed
from gdsstore.transfer.load import Landed, LoadJob, load
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.results import LoadResult, PageStatus, SaveResult
from gdsstore.volume.format import Geometry
from gdsstore.volume.tombstones import bury
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.device_moving import DeviceMoving
    from gdsstore.store import Store

log = logging.getLogger("gdsstore.store")


@dataclass(frozen=True, slots=True)
class Call:
    """One call's pages. `keys`: uint8 (n, 32). `moving`: what moves their memory; None: what moves the host's."""

    keys: npt.NDArray[np.uint8]
    memory: PageMemory
    moving: DeviceMoving | None
    deadline: Deadline
    admission: Admission

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, index: npt.NDArray[np.intp]) -> Call:
        """The call of some of its pages."""
        return Call(self.keys[index], self.memory.take(index), self.moving, self.deadline, self.admission)


class DrivePages:
    """Thread-safe; lives as long as its store is open."""

    def __init__(self, store: Store, namespace: Identity) -> None:
        self._store = store
        self.digest = namespace.digest
        self.page_bytes = namespace.layout.page_bytes
        self.record_bytes = namespace.layout.record_bytes
        self.geometry = Geometry.of(store.segment_bytes, self.record_bytes)

    def save(self, call: Call, layered: LayeredSave | None = None) -> SaveResult:
        """Write what is not there yet. `layered`: writes layer by layer."""
        index, tag = index_keys(call.keys, self.digest)
        status = np.full(len(call), PageStatus.PENDING, np.uint8)
        with self._store.using() as store:
            where = store.catalog.resolve(index, tag)
            store.heat.touch(where.segment[where.found], where.slot[where.found])
            status[where.found] = PageStatus.ALREADY_THERE
            first, inverse = np.unique(
                call.keys.view("V32").reshape(-1), return_index=True, return_inverse=True
            )[1:]
            fresh = np.zeros(len(call), np.bool_)
            fresh[first] = True
            at = np.flatnonzero(fresh & ~where.found)
            job = SaveJob(
                at, call.keys[at], index[at], tag[at], self.digest, call.memory.take(at), self.record_bytes
            )
            result = SaveResult(status)
            if len(at):
                route = (call.moving or store.moving()).route(Op.WRITE, self.record_bytes, len(at))
                if layered is None:
                    with route.timed(status):
                        result = route.saver.save(job, status, call.deadline, call.admission)
                else:  # its time is the forward's
                    result = layered.write(route.saver, job, status, call.deadline, call.admission)
            # A key that came again shares its first one's fate.
            again = np.flatnonzero(~fresh)
            fate = status[first[inverse[again]]]
            status[again] = np.where(fate == PageStatus.SAVED, PageStatus.ALREADY_THERE, fate)
            store.counters.outcome(result.reasons())
        return result

    @property
    def io_deadline_s(self) -> float:
        return self._store.config.io_deadline_s

    def mover(self, call: Call, op: Op, pages: int) -> Mover:
        """What moves so many pages of a call now. Raises EngineError."""
        return (call.moving or self._store.moving()).route(op, self.record_bytes, pages).mover

    def count(self, outcomes: dict[str, int]) -> None:
        """Count pages whose outcome no call here has counted, by the names of PageStatus."""
        self._store.counters.outcome(outcomes)

    def has(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Which pages are on the drives. Shape (n,)."""
        index, tag = index_keys(keys, self.digest)
        with self._store.using() as store:
            return store.catalog.resolve(index, tag).found

    def load(
        self,
        call: Call,
        landed: Landed | None = None,
        meanwhile: Iterator[None] | None = None,
        *,
        verify: bool = False,
        layered: LayeredLoad | None = None,
    ) -> LoadResult:
        """Read what is there. `landed` and `meanwhile`: see `transfer.load.load`; the former is told positions in the call.
        `verify`: whatever the config says. `layered`: reads layer by layer, without `meanwhile`."""
        index, tag = index_keys(call.keys, self.digest)
        status = np.full(len(call), PageStatus.MISS_ABSENT, np.uint8)
        with self._store.using() as store:
            where, rows = store.catalog.locate(index, tag)
            at, placed = self.place(where, rows)
            fit = call.admission.readable(placed.volume)
            status[at[~fit]] = PageStatus.MISS_VOLUME_SICK
            at, placed = at[fit], placed.take(fit)
            store.heat.touch(where.segment[at], where.slot[at])

            job = LoadJob(
                at,
                call.keys[at],
                self.digest,
                call.memory.take(at),
                _take(where, at),
                placed,
                self.record_bytes,
            )

            def still_there(pages: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
                now, rows_now = store.catalog.locate(index[at[pages]], tag[at[pages]])
                good = self.place(now, rows_now)[0]
                same = np.zeros(len(pages), np.bool_)
                same[good] = (now.generation == job.where.generation[pages])[good]
                return same

            result = LoadResult(status)
            if len(at):
                route = (call.moving or store.moving()).route(Op.READ, self.record_bytes, len(at))
                with route.timed(status), store.cost.observed(lambda: self.record_bytes * result.loaded):
                    read = (
                        partial(load, landed=landed, meanwhile=meanwhile)
                        if layered is None
                        else partial(layered.read, landed=landed)
                    )
                    result = read(
                        route.mover,
                        job,
                        status,
                        route.chunk_bytes,
                        store.config.verify or verify,
                        still_there,
                        call.deadline,
                        call.admission,
                    )
            self._drop_damaged(index, where, status)
            store.counters.outcome(result.reasons())
        return result

    def place(self, where: Locations, rows: dict[int, SegmentRow]) -> tuple[npt.NDArray[np.intp], Placed]:
        """Which pages can be read, and where they lie on the drives."""
        known = np.zeros(len(where.found), np.bool_)
        volume = np.zeros(len(where.found), np.int64)
        for segment_id, row in rows.items():
            mine = where.found & (where.segment == segment_id)
            usable = row.state is not SegmentState.LOST and row.slot_bytes == self.record_bytes
            known |= mine & (where.generation == row.generation) if usable else False
            volume[mine] = row.volume
        known &= where.payload_bytes == self.page_bytes
        at = np.flatnonzero(known)
        return at, Placed(
            where.segment[at], volume[at], self.geometry.slot_offset(where.slot[at].astype(np.int64))
        )

    def _drop_damaged(
        self, index: npt.NDArray[np.uint64], where: Locations, status: npt.NDArray[np.uint8]
    ) -> None:
        damaged = np.flatnonzero(status == PageStatus.MISS_CHECKSUM)
        gone = (status == PageStatus.MISS_SEGMENT) | (status == PageStatus.MISS_IO)
        try:
            gone[damaged] = True
            if gone.any():
                lost = drop_lost_segments(self._store, np.unique(where.segment[gone]).tolist())
                damaged = damaged[~np.isin(where.segment[damaged], list(lost))]
            if len(damaged):
                report_damage(self._store, where.segment[damaged], where.slot[damaged])
                self.remove(index[damaged], _take(where, damaged))
        except GdsStoreError as error:  # a full drive, say: the loads that went well stay good
            log.error("damaged pages could not be dropped, and will miss again: %s", error)

    def remove(self, index: npt.NDArray[np.uint64], where: Locations) -> npt.NDArray[np.bool_]:
        """Forget pages, and see to it that a rebuild does not bring them back. Returns which were there, shape (n,)."""
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
                        bury(volume, segment_id, self.geometry, row.generation, slots, store.uuid, sequence)
                    except VolumeError as error:
                        if (
                            error.context.get("errno") not in NO_FILE
                        ):  # without its file, no page can come back
                            raise
        return gone


def _take(where: Locations, at: npt.NDArray[np.intp]) -> Locations:
    return Locations(
        where.found[at],
        where.segment[at],
        where.slot[at],
        where.generation[at],
        where.checksum[at],
        where.payload_bytes[at],
    )

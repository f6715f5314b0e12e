"""Which process writes where: segments are owned by `flock` while they are filled, and taken over when their owner is gone.

A pool gives out runs of consecutive slots. Where no segment of the right slot size is at hand it takes, in this order: one
that a dead or finished writer left partly filled, a free one, a new one within the capacity, or the coldest full one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gdsstore.catalog.heat import Heat
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.lost import give_up, is_lost
from gdsstore.catalog.reclaim import Reclaimer
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.errors import GdsStoreError, StoreError, VolumeError
from gdsstore.volume.format import SUPERBLOCK_BYTES, TABLE_OFFSET, Geometry, Superblock
from gdsstore.volume.placement import Placement
from gdsstore.volume.volume import Volume, clear_entries
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.catalog")

TAKE_ATTEMPTS = 8
FULL_PAUSE_S = 2.0  # how long a full drive is not asked again


@dataclass(frozen=True, slots=True)
class SlotRun:
    """`count` consecutive slots that this process may write, and nobody else."""

    owned: OwnedSegment
    first: int
    count: int


class OwnedSegment:
    """A segment that this process holds the lock of. `table_fd` carries the lock."""

    def __init__(self, row: SegmentRow, geometry: Geometry, volume: Volume, table_fd: int) -> None:
        self.row = row
        self.geometry = geometry
        self.volume = volume
        self.table_fd = table_fd
        self.next_slot = row.filled
        self.outstanding = 0  # runs given out and not finished
        self.dirty = False  # has writes that no fdatasync covers
        self.retired = False  # gives out no more slots
        self.released = False  # the lock is given up: others may fill or reclaim it
        self.unsure = False  # an fdatasync failed: nothing in it that is not committed may be called durable
        self.syncing = False  # its descriptor is in use by `SegmentPool.sync`

    @property
    def segment_id(self) -> int:
        return self.row.segment_id

    @property
    def room(self) -> int:
        return 0 if self.retired else self.geometry.slot_count - self.next_slot


class SegmentPool:
    """The segments that one process fills. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        volumes: Sequence[Volume],
        heat: Heat,
        placement: Placement,
        reclaimer: Reclaimer,
        store_uuid: bytes,
        segment_bytes: int,
        on_take: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_take` is called, with the pool's lock held, when a segment was taken: the next one may be made ready."""
        self._on_take = on_take
        self._catalog, self._volumes, self._heat = catalog, volumes, heat
        self._placement, self._reclaimer = placement, reclaimer
        self._uuid, self._segment_bytes = store_uuid, segment_bytes
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], OwnedSegment] = {}  # (slot bytes, volume) -> the one being filled
        self._owned: dict[int, OwnedSegment] = {}
        # Given up before they were synced: locked until then, a store filled around meanwhile could reclaim none.
        self._unsynced: list[OwnedSegment] = []
        self._sync_turn = threading.Lock()
        self._full_until = 0.0

    def reserve(self, slot_bytes: int, count: int, deadline: Deadline) -> list[SlotRun]:
        """Up to `count` slots, in runs, all on one volume if possible. Fewer, or none, where the store has no room, or no volume
        is usable."""
        runs: list[SlotRun] = []
        with self._lock:
            volume = self._placement.choose()
            while volume is not None and count > 0 and not deadline.passed:
                segment = self._open.get((slot_bytes, volume))
                if segment is None or segment.room == 0:
                    segment = self._take(slot_bytes, volume)
                    if segment is None:
                        break
                    self._open[slot_bytes, segment.volume.index] = segment
                    volume = segment.volume.index
                n = min(count, segment.room)
                runs.append(SlotRun(segment, segment.next_slot, n))
                segment.next_slot += n
                segment.outstanding += 1
                count -= n
        return runs

    def hold(self, run: SlotRun) -> None:
        """Keep a run's segment for as long as the drive may write to it; `finish` ends that, as it ends the reservation."""
        with self._lock:
            run.owned.outstanding += 1

    def finish(self, run: SlotRun, *, failed: bool) -> None:
        """A run was committed or given up, or its I/O has ended. After a failed write the segment gets no further ones from us."""
        with self._lock:
            segment = run.owned
            segment.outstanding -= 1
            segment.retired |= failed
            if segment.room == 0 and segment.outstanding == 0:
                self._release(segment)

    def sync(self) -> None:
        """fdatasync every segment that has unsynced writes. Raises VolumeError for the first that fails."""
        failure: OSError | None = None
        # One at a time: a second one finds nothing to do, and must not return before the first is through.
        with self._sync_turn:
            with self._lock:
                due = [*self._unsynced, *(segment for segment in self._owned.values() if segment.dirty)]
                self._unsynced = []
                for segment in due:
                    segment.dirty, segment.syncing = False, True
            for segment in due:
                try:
                    os.fdatasync(segment.table_fd)
                except OSError as error:
                    failure = failure or error
                    segment.retired = segment.unsure = True
            with self._lock:
                for segment in due:
                    segment.syncing = False
                    self._close_unused(segment)
                unsure = any(segment.unsure for segment in self._owned.values())
        if failure is None and unsure:
            # The kernel reports a failed write-back once, but these pages are no more durable the second time.
            failure = OSError(errno.EIO, "an earlier fdatasync failed")
        if failure is not None:
            raise VolumeError(
                "fdatasync failed: pages of the last seconds may not be durable", errno=failure.errno
            )

    def mark_dirty(self, run: SlotRun) -> None:
        run.owned.dirty = True

    def close(self) -> None:
        """Give up every segment; others may go on filling them."""
        with self._lock:
            for segment in list(self._owned.values()):
                self._release(segment)
            for segment in self._unsynced:
                segment.dirty = False
                self._close_unused(segment)
            self._unsynced = []

    @property
    def unsynced_segments(self) -> int:
        """How many given-up segments keep a file open until the next `sync`."""
        return len(self._unsynced)

    @property
    def lock_fds(self) -> list[int]:
        """Descriptors that carry locks: a forked child must close them."""
        return [segment.table_fd for segment in list(self._owned.values())]

    # --- taking a segment; all under self._lock ---

    def _take(self, slot_bytes: int, volume: int) -> OwnedSegment | None:
        """A segment to fill, on another volume only where this one has no room: pages are striped."""
        geometry = Geometry.of(self._segment_bytes, slot_bytes)
        rows = [row for row in self._rows() if self._placement.usable(row.volume)]
        mine = self._take_made([row for row in rows if row.volume == volume], geometry)
        if mine is not None:
            return mine
        fresh = self.grow(volume)
        if fresh is None:
            # First what we fill already: a second one beside it would stay half full for as long as we live.
            filling = [s for (size, _), s in self._open.items() if size == slot_bytes and s.room]
            usable = [s for s in filling if self._placement.usable(s.volume.index)]
            others = [row for row in rows if row.volume != volume]
            elsewhere = usable[0] if usable else self._take_made(others, geometry)
            if elsewhere is not None:
                return elsewhere
        for _ in range(TAKE_ATTEMPTS):  # another process may be quicker to what we freed
            fresh = fresh or self._reclaimer.reclaim_one()
            if fresh is None:
                return None
            if self._placement.usable(fresh.volume):  # else it was reclaimed for later
                segment = self._own(fresh, SegmentState.FREE, geometry)
                if segment is not None:
                    return segment
            fresh = self.grow(volume)
        return None

    def _take_made(self, rows: Sequence[SegmentRow], geometry: Geometry) -> OwnedSegment | None:
        """One of these, if there is one to fill: first those that are filled in part."""
        slot_bytes = geometry.slot_bytes
        for row in rows:
            open_to_us = row.state is SegmentState.OPEN and row.slot_bytes == slot_bytes
            if open_to_us and row.filled < row.slot_count:
                segment = self._own(row, SegmentState.OPEN, geometry)
                if segment is not None:
                    return segment
        for row in rows:
            if row.state is SegmentState.FREE:
                segment = self._own(row, SegmentState.FREE, geometry)
                if segment is not None:
                    return segment
        return None

    def _rows(self) -> list[SegmentRow]:
        with self._catalog.read() as txn:
            return self._catalog.segments(txn)

    def grow(self, volume: int) -> SegmentRow | None:
        """A new free segment, if the capacity and the drive have room for one."""
        if time.monotonic() < self._full_until:
            return None
        try:
            with self._catalog.write() as txn:
                if len(self._catalog.segments(txn)) >= self._reclaimer.max_segments():
                    return None
                segment_id = self._catalog.next_segment_id(txn)
                # The row first: it counts against the capacity while the file is being written.
                row = SegmentRow(segment_id, volume, SegmentState.LOST, 0, 0, 0, 0)
                self._catalog.put_segment(txn, row)
            return self._make(row)
        except StoreError as error:
            log.warning("no new segment: %s", error)
            self._full_until = time.monotonic() + FULL_PAUSE_S
            return None

    def _make(self, row: SegmentRow) -> SegmentRow | None:
        geometry = Geometry.of(
            self._segment_bytes, self._segment_bytes // 16
        )  # any will do: it is formatted on use
        superblock = Superblock(self._uuid, row.segment_id, 1, geometry)
        try:
            self._heat.cover(row.segment_id)
            self._volumes[row.volume].create_segment(superblock)
        except GdsStoreError as error:
            level = logging.WARNING if error.context.get("errno") == errno.ENOSPC else logging.ERROR
            log.log(level, "no new segment: %s", error)
            self._full_until = time.monotonic() + FULL_PAUSE_S
            with self._catalog.write() as txn:
                self._catalog.forget_segment(txn, row.segment_id)
                self._catalog.return_segment_id(
                    txn, row.segment_id
                )  # a drive that is full for days uses no ids up
            return None
        row = row.with_(state=SegmentState.FREE, generation=1)
        with self._catalog.write() as txn:
            self._catalog.put_segment(txn, row)
        return row

    def _own(self, row: SegmentRow, state: SegmentState, geometry: Geometry) -> OwnedSegment | None:
        """Lock a segment and make sure that it is still what `row` said. A FREE one is formatted for `geometry`."""
        if row.segment_id in self._owned:
            return None
        volume = self._volumes[row.volume]
        fd, owned = -1, None
        try:
            fd = volume.open_table(row.segment_id)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owned = self._claim(row, state, geometry, volume, fd)
        except BlockingIOError:
            pass  # somebody fills it
        except (OSError, VolumeError) as error:
            log.error("segment %s cannot be used: %s", volume.segment_path(row.segment_id), error)
            if is_lost(error):
                give_up(self._catalog, volume, row)
        finally:
            if owned is not None:
                self._owned[row.segment_id] = owned
                self._on_take()
            elif fd >= 0:
                os.close(fd)
        return owned

    def _claim(
        self, row: SegmentRow, state: SegmentState, geometry: Geometry, volume: Volume, fd: int
    ) -> OwnedSegment | None:
        with self._catalog.read() as txn:
            now = self._catalog.segment(txn, row.segment_id)
        if (
            now is None
            or now.state is not state
            or (state is SegmentState.OPEN and now.slot_bytes != geometry.slot_bytes)
        ):
            return None
        self._check(now, volume, fd)
        if state is SegmentState.OPEN:
            # What its last owner did not live to commit must not come back beside the payloads that we write there.
            clear_entries(fd, geometry, now.filled)
            return OwnedSegment(now, geometry, volume, fd)
        generation = max(now.generation + 1, time.time_ns())
        superblock = Superblock(self._uuid, row.segment_id, generation, geometry)
        os.pwrite(fd, superblock.encode(), 0)
        # In whole pages: one written in part would be read first, behind all that the drive has to do.
        os.pwrite(fd, bytes(geometry.data_offset - TABLE_OFFSET), TABLE_OFFSET)
        self._heat.reset(row.segment_id)
        fresh = SegmentRow(
            row.segment_id,
            row.volume,
            SegmentState.OPEN,
            geometry.slot_bytes,
            geometry.slot_count,
            generation,
            0,
        )
        with self._catalog.write() as txn:
            self._catalog.put_segment(txn, fresh)
        return OwnedSegment(fresh, geometry, volume, fd)

    def _check(self, row: SegmentRow, volume: Volume, fd: int) -> None:
        """Nothing is written into a file that is not the segment which the catalog knows. Raises VolumeError."""
        path = str(volume.segment_path(row.segment_id))
        superblock = Superblock.decode(os.pread(fd, SUPERBLOCK_BYTES, 0), path)
        if (superblock.store_uuid, superblock.segment_id) != (self._uuid, row.segment_id):
            raise VolumeError("the segment belongs to another store", path=path)
        if row.state is SegmentState.OPEN and superblock.generation != row.generation:
            raise VolumeError("the segment was exchanged", path=path)
        if os.fstat(fd).st_size < self._segment_bytes:
            raise VolumeError("the segment was cut short", path=path)

    def _release(self, segment: OwnedSegment) -> None:
        if segment.released:
            return  # the pool was closed under a transfer that ended only now
        segment.released = True
        self._owned.pop(segment.segment_id, None)
        key = segment.geometry.slot_bytes, segment.volume.index
        if self._open.get(key) is segment:
            del self._open[key]
        fcntl.flock(segment.table_fd, fcntl.LOCK_UN)
        if segment.dirty:
            self._unsynced.append(segment)
        self._close_unused(segment)

    def _close_unused(self, segment: OwnedSegment) -> None:
        if segment.released and not segment.dirty and not segment.syncing:
            os.close(segment.table_fd)

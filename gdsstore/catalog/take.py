"""Getting a segment to fill: one that a dead or finished writer left partly filled, a free one, a new one within the capacity, or
the coldest full one, in this order.

All of it may wait for a drive, in system calls that have no deadline: see `SegmentPool`, which keeps others from waiting with it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence

from gdsstore.catalog.heat import Heat
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.lost import give_up, is_lost
from gdsstore.catalog.owned import OwnedSegment
from gdsstore.catalog.reclaim import Reclaimer
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.errors import GdsStoreError, StoreError, VolumeError
from gdsstore.volume.format import SUPERBLOCK_BYTES, TABLE_OFFSET, Geometry, Superblock
from gdsstore.volume.placement import Placement
from gdsstore.volume.volume import Volume, clear_entries, inode_of

log = logging.getLogger("gdsstore.catalog")

TAKE_ATTEMPTS = 8
FULL_PAUSE_S = 2.0  # how long a full drive is not asked again


class SegmentTaker:
    """Thread-safe: the catalog's transactions and the segments' locks order what several threads and processes do at once."""

    def __init__(
        self,
        catalog: Catalog,
        volumes: Sequence[Volume],
        heat: Heat,
        placement: Placement,
        reclaimer: Reclaimer,
        store_uuid: bytes,
        segment_bytes: int,
    ) -> None:
        self._catalog, self._volumes, self._heat = catalog, volumes, heat
        self._placement, self._reclaimer = placement, reclaimer
        self._uuid, self._segment_bytes = store_uuid, segment_bytes
        self._full_until = 0.0
        self.lock_fds: set[int] = set()  # of segments that are being got; descriptors that may carry a lock

    def take(
        self, slot_bytes: int, volume: int, filling: Callable[[], Sequence[OwnedSegment]]
    ) -> OwnedSegment | None:
        """A segment to fill, on another volume only where this one has no room: pages are striped. None where there is no room.

        `filling`: those with slots of that size that this process fills, and that have room.
        """
        geometry = Geometry.of(self._segment_bytes, slot_bytes)
        rows = [row for row in self._rows() if self._placement.usable(row.volume)]
        mine = self._take_made([row for row in rows if row.volume == volume], geometry)
        if mine is not None:
            return mine
        fresh = self.grow(volume)
        if fresh is None:
            # First what we fill already: a second one beside it would stay half full for as long as we live.
            usable = [segment for segment in filling() if self._placement.usable(segment.volume.index)]
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
            self._forget(row, used=error.context.get("errno") == errno.EEXIST)
            return None
        except BaseException:
            self._forget(row)
            raise
        row = row.with_(state=SegmentState.FREE, generation=1)
        with self._catalog.write() as txn:
            self._catalog.put_segment(txn, row)
        return row

    def _forget(self, row: SegmentRow, *, used: bool = False) -> None:
        """A segment never came to be. Its id is free again: a drive that is full for days uses none up. `used`: not where a file
        has that name already, or no other one would ever be tried."""
        with self._catalog.write() as txn:
            self._catalog.forget_segment(txn, row.segment_id)
            if not used:
                self._catalog.return_segment_id(txn, row.segment_id)

    def _own(self, row: SegmentRow, state: SegmentState, geometry: Geometry) -> OwnedSegment | None:
        """Lock a segment and make sure that it is still what `row` said. A FREE one is formatted for `geometry`."""
        volume = self._volumes[row.volume]
        fd, owned = -1, None
        try:
            fd = volume.open_table(row.segment_id)
            self.lock_fds.add(fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owned = self._claim(row, state, geometry, volume, fd)
        except BlockingIOError:
            pass  # somebody fills it, perhaps we
        except (OSError, VolumeError) as error:
            log.error("segment %s cannot be used: %s", volume.segment_path(row.segment_id), error)
            if is_lost(error):
                give_up(self._catalog, volume, row)
        finally:
            self.lock_fds.discard(fd)
            if owned is None and fd >= 0:
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
        file = inode_of(os.fstat(fd))
        if state is SegmentState.OPEN and volume.filling.get(row.segment_id, file) != file:
            return None  # we fill the file that was there before, perhaps; the lock of this one says nothing of that
        volume.filling[row.segment_id] = file
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

"""Segments that this process fills: each by the `flock` that it holds, which the kernel drops when it dies."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from gdsstore.catalog.records import SegmentRow
from gdsstore.volume.format import Geometry
from gdsstore.volume.volume import Volume


@dataclass(frozen=True, slots=True)
class SlotRun:
    """`count` consecutive slots that this process may write, and nobody else."""

    owned: OwnedSegment
    first: int
    count: int


@dataclass(slots=True, eq=False)
class SegmentSync:
    """An fdatasync of a segment that was begun. `since`: when, on the monotonic clock."""

    segment: OwnedSegment
    future: Future[None]
    since: float


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
        self.sync: SegmentSync | None = None  # the fdatasync that is under way and uses its descriptor
        self.writers = 0  # threads that write to its table just now

    @property
    def segment_id(self) -> int:
        return self.row.segment_id

    @property
    def room(self) -> int:
        return 0 if self.retired else self.geometry.slot_count - self.next_slot

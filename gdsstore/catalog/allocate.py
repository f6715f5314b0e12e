"""Which process writes where: segments are owned by `flock` while they are filled, and taken over when their owner is gone.

A pool gives out runs of consecutive slots of the segments that its process fills. To get another segment, to write a record table
and to sync may take as long as the drive likes, so that happens in threads of their own: a save waits for it up to its deadline,
and others not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from gdsstore.catalog.late_calls import LateCalls
from gdsstore.catalog.owned import OwnedSegment, SlotRun
from gdsstore.catalog.records import SegmentRow
from gdsstore.catalog.syncs import Failures, SegmentSyncs, refused
from gdsstore.catalog.take import SegmentTaker
from gdsstore.errors import DeadlineError, StoreError, VolumeError
from gdsstore.volume.placement import Placement
from gdsstore.waiting import Deadline

STALL_S = 5.0  # a drive that needs longer for a segment, a record table or an fdatasync does not answer


@dataclass(slots=True)
class _Take:
    """A segment that is being got."""

    future: Future[OwnedSegment | None] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class SegmentPool:
    """The segments that one process fills. Thread-safe."""

    def __init__(
        self,
        taker: SegmentTaker,
        placement: Placement,
        *,
        on_take: Callable[[], None] = lambda: None,
        on_stall: Callable[[int, str, float], None] = lambda volume, what, seconds: None,
    ) -> None:
        """`on_take` is called when a segment was taken: the next one may be made ready. `on_stall` is told the volume, what it was
        to do and for how many seconds, where somebody gave up waiting for what takes longer than a drive needs."""
        self._taker, self._placement = taker, placement
        self._on_take, self._on_stall = on_take, on_stall
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], OwnedSegment] = {}  # (slot bytes, volume) -> the one being filled
        self._owned: dict[int, OwnedSegment] = {}
        self._takes: dict[tuple[int, int], _Take] = {}
        # Given up before they were synced: locked until then, a store filled around meanwhile could reclaim none.
        self._unsynced: set[OwnedSegment] = set()
        # Given up by `close` while they were written to: locked until that has ended.
        self._writing_late: set[OwnedSegment] = set()
        self.calls = LateCalls()
        self._syncs = SegmentSyncs(self._lock, self.calls, self._synced, self._sync_late)
        self._closed = False

    def reserve(self, slot_bytes: int, count: int, deadline: Deadline) -> list[SlotRun]:
        """Up to `count` slots, in runs, all on one volume if possible. Fewer, or none, where the store has no room, no volume is
        usable, or the drive did not get a segment ready in time. Raises VolumeError, StoreError."""
        runs: list[SlotRun] = []
        try:
            self._reserve(slot_bytes, count, deadline, runs)
        except BaseException:
            for run in runs:
                self.finish(run, failed=False)
            raise
        return runs

    def _reserve(self, slot_bytes: int, count: int, deadline: Deadline, runs: list[SlotRun]) -> None:
        with self._lock:
            volume = self._placement.choose()
        while volume is not None and count > 0 and not deadline.passed:
            with self._lock:
                segment = self._open.get((slot_bytes, volume))
                n = 0 if segment is None else min(count, segment.room)
                if segment is not None and n:
                    runs.append(SlotRun(segment, segment.next_slot, n))
                    segment.next_slot += n
                    segment.outstanding += 1
                    count -= n
            if n == 0:
                segment = self._take(slot_bytes, volume, deadline)
                if segment is None:
                    break
                volume = segment.volume.index

    def _take(self, slot_bytes: int, volume: int, deadline: Deadline) -> OwnedSegment | None:
        """A segment that had room just now, which `_open` has unless it was filled up since; None where there is none, or not in
        time."""
        key = slot_bytes, volume
        with self._lock:
            take = self._takes.get(key)
            if take is None:
                take = _Take()
                self._start(key, take)
                self._takes[key] = take
        try:
            return take.future.result(deadline.left_s)
        except TimeoutError:
            self.late(volume, "get a segment ready", take.since)
            return None

    def late(self, volume: int, what: str, since: float) -> None:
        """Somebody gave up waiting for a drive that was to do something since a time on the monotonic clock."""
        seconds = time.monotonic() - since
        if seconds >= STALL_S:
            self._on_stall(volume, what, seconds)

    def _start(self, key: tuple[int, int], take: _Take) -> None:
        thread = threading.Thread(
            target=self._run_take, args=(key, take), name="gdsstore-segment", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise StoreError(f"no thread can be started to get a segment ready: {error}") from error

    def _run_take(self, key: tuple[int, int], take: _Take) -> None:
        slot_bytes, volume = key
        segment, failure = None, None
        try:
            segment = self._taker.take(slot_bytes, volume, lambda: self._filling(slot_bytes))
        except BaseException as error:  # who waits for it gets it
            failure = error
        with self._lock:
            del self._takes[key]
            if segment is not None:
                segment = self._enter(segment)
        if segment is not None:
            self._on_take()
        if failure is None:
            take.future.set_result(segment)
        else:
            take.future.set_exception(failure)

    def _enter(self, segment: OwnedSegment) -> OwnedSegment | None:
        """The segment to fill now that a take got this one; None where the pool is closed."""
        if segment.released or self._owned.get(segment.segment_id) is segment:
            return segment  # one of `_filling`; others may have filled it up since
        key = segment.geometry.slot_bytes, segment.volume.index
        other = self._open.get(key)
        self._owned[segment.segment_id] = segment
        if self._closed:
            self._release(segment)
            return None
        if other is not None and other.room:
            # The take of another volume came here too. Its segment is for whoever needs the next one: beside the other it would
            # stay half full for as long as we live.
            self._release(segment)
            return other
        self._open[key] = segment
        return segment

    def _filling(self, slot_bytes: int) -> list[OwnedSegment]:
        with self._lock:
            return [
                segment for (size, _), segment in self._open.items() if size == slot_bytes and segment.room
            ]

    def grow(self, volume: int) -> SegmentRow | None:
        """A new free segment, if the capacity and the drive have room for one. Waits for the drive."""
        return self._taker.grow(volume)

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

    def sync(self, deadline: Deadline) -> None:
        """fdatasync every segment that has unsynced writes. Raises VolumeError for the first that fails, and DeadlineError: the
        drives go on with it, and the next call waits for them again."""
        failures = self._syncs.cover_all(lambda: [*self._unsynced, *self._owned.values()], deadline)
        with self._lock:
            failures = _unsure(self._owned.values()) | failures
        for error in sorted(failures.values(), key=lambda error: isinstance(error, DeadlineError)):
            raise error

    def sync_segments(self, segments: Iterable[OwnedSegment], deadline: Deadline) -> Failures:
        """fdatasync these segments of runs that are not finished, where that is due. Which of them are not durable by then."""
        mine = list(segments)
        failures = self._syncs.cover(mine, deadline)
        with self._lock:
            closed = VolumeError("the store was closed before these pages were durable")
            return {each: closed for each in mine if each.released} | _unsure(mine) | failures

    def _synced(self, segment: OwnedSegment) -> None:
        if not segment.dirty:
            self._unsynced.discard(segment)
        self._close_unused(segment)

    def _sync_late(self, segment: OwnedSegment, since: float) -> None:
        self.late(segment.volume.index, "end an fdatasync", since)

    @contextlib.contextmanager
    def writing(self, run: SlotRun) -> Iterator[int]:
        """The descriptor of a run's table, for writes inside a `with`. Raises OSError where the pool was closed under a transfer
        that ended only now: the number may be that of a file of somebody else's."""
        segment = run.owned
        with self._lock:
            if segment.released:
                raise OSError(errno.EBADF, "the store was closed")
            segment.writers += 1
        try:
            yield segment.table_fd
        finally:
            with self._lock:
                # Not before: a sync in between would count for what it did not cover. After a close nobody syncs.
                segment.dirty = not segment.released
                segment.writers -= 1
                self._close_unused(segment)

    def close(self, timeout_s: float = 0.0) -> None:
        """Give up every segment; others may go on filling them. Segments that are being got are waited for, at most `timeout_s`."""
        with self._lock:
            self._closed = True
            takes = list(self._takes.values())
        wait([take.future for take in takes], timeout_s)
        with self._lock:
            for segment in list(self._owned.values()):
                self._release(segment)
            for segment in self._unsynced:
                segment.dirty = False
                self._close_unused(segment)
            self._unsynced.clear()
        self.calls.close()

    @property
    def unsynced_segments(self) -> int:
        """How many given-up segments keep a file open until the next `sync`."""
        return len(self._unsynced)

    @property
    def lock_fds(self) -> list[int]:
        """Descriptors that carry locks: a forked child must close them."""
        segments = [*self._owned.values(), *self._writing_late]
        return list({*self._taker.lock_fds, *(segment.table_fd for segment in segments)})

    def _release(self, segment: OwnedSegment) -> None:
        if segment.released:
            return  # the pool was closed under a transfer that ended only now
        segment.released = True
        self._owned.pop(segment.segment_id, None)
        key = segment.geometry.slot_bytes, segment.volume.index
        if self._open.get(key) is segment:
            del self._open[key]
        if segment.writers:  # closed under it: what another process writes there must not be hit
            self._writing_late.add(segment)
        else:
            fcntl.flock(segment.table_fd, fcntl.LOCK_UN)
        if segment.dirty:
            self._unsynced.add(segment)
        self._close_unused(segment)

    def _close_unused(self, segment: OwnedSegment) -> None:
        if not segment.released or segment.writers:
            return
        if segment in self._writing_late:
            self._writing_late.discard(segment)
            fcntl.flock(segment.table_fd, fcntl.LOCK_UN)
        if not segment.dirty and segment.sync is None:
            os.close(segment.table_fd)


def _unsure(segments: Iterable[OwnedSegment]) -> Failures:
    """The kernel reports a failed write-back once, but these pages are no more durable the second time."""
    failure = OSError(errno.EIO, "an earlier fdatasync failed")
    return {segment: refused(failure) for segment in segments if segment.unsure}

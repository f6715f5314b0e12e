"""fdatasync of segments: one at a time for a segment, those of a volume in a thread of their own, waited for up to a deadline."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from gdsstore.catalog.late_calls import LateCalls, result_by
from gdsstore.catalog.owned import OwnedSegment, SegmentSync
from gdsstore.errors import DeadlineError, GdsStoreError, VolumeError
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.catalog")

Failures = dict[OwnedSegment, GdsStoreError]
"""VolumeError where an fdatasync failed, DeadlineError where it is under way still."""


class SegmentSyncs:
    """For one `SegmentPool`, whose lock it shares."""

    def __init__(
        self,
        lock: threading.Lock,
        calls: LateCalls,
        ended: Callable[[OwnedSegment], None],
        late: Callable[[OwnedSegment, float], None],
    ) -> None:
        """`ended` is called, with the lock held, when a segment is not being synced any more; `late`, without it, where a wait for
        one ended before its fdatasync did, with the time on the monotonic clock when that began."""
        self._lock, self._calls, self._ended, self._late = lock, calls, ended, late
        self._running: set[SegmentSync] = set()
        self._left: set[SegmentSync] = set()  # that a `cover_all` did not see the end of

    def cover(self, segments: Iterable[OwnedSegment], deadline: Deadline) -> Failures:
        """Sync what was written to these segments until now. Those that failed, or were not through in time."""
        return {sync.segment: error for sync, error in self._cover(list(segments), set(), deadline).items()}

    def cover_all(self, segments: Callable[[], Iterable[OwnedSegment]], deadline: Deadline) -> Failures:
        """The same for those of `segments`, which is asked with the lock held, and for all that are being synced already. What an
        earlier call did not see the end of counts too: if it failed since, this one says so."""
        with self._lock:
            mine = list(segments())
            others = self._running | self._left
        failures = self._cover(mine, others, deadline)
        late = {sync for sync, error in failures.items() if isinstance(error, DeadlineError)}
        with self._lock:
            self._left = (self._left - others) | late
        return {sync.segment: error for sync, error in failures.items()}

    def _cover(
        self, segments: list[OwnedSegment], others: set[SegmentSync], deadline: Deadline
    ) -> dict[SegmentSync, GdsStoreError]:
        with self._lock:
            # What is under way does not cover what was written after it had begun. The one that is next does, whoever begins it.
            again = [segment for segment in segments if segment.dirty and segment.sync is not None]
            due = self._begin(segments)
        failures = self._wait(due | others, deadline)
        if again:
            failed = {sync.segment for sync in failures}
            with self._lock:
                due = self._begin([segment for segment in again if segment not in failed])
            failures |= self._wait(due, deadline)
        return failures

    def _begin(self, segments: list[OwnedSegment]) -> set[SegmentSync]:
        """With the lock held: what is to be waited for. Raises StoreError where no thread can be started."""
        volumes: dict[int, list[OwnedSegment]] = defaultdict(list)
        for segment in segments:
            if segment.dirty and segment.sync is None:
                volumes[segment.volume.index].append(segment)
        for due in volumes.values():
            self._start(due)
        return {segment.sync for segment in segments if segment.sync is not None}

    def _start(self, due: list[OwnedSegment]) -> None:
        for segment in due:
            segment.dirty, segment.sync = False, SegmentSync(segment, Future(), time.monotonic())
        syncs = [segment.sync for segment in due if segment.sync is not None]
        try:
            self._calls.start(partial(self._run, syncs))
        except BaseException:
            for segment in due:
                segment.dirty, segment.sync = True, None
            raise
        self._running.update(syncs)

    def _run(self, syncs: list[SegmentSync]) -> None:
        for sync in syncs:
            segment, failure = sync.segment, None
            sync.since = time.monotonic()
            try:
                os.fdatasync(segment.table_fd)
            except BaseException as error:  # who waits for it gets it
                failure = error
                log.error("fdatasync of segment %d failed: %s", segment.segment_id, error)
            with self._lock:
                if failure is not None:
                    segment.retired = segment.unsure = True
                segment.sync = None
                self._running.discard(sync)
                self._ended(segment)
            if failure is None:
                sync.future.set_result(None)
            else:
                sync.future.set_exception(failure)

    def _wait(self, syncs: Iterable[SegmentSync], deadline: Deadline) -> dict[SegmentSync, GdsStoreError]:
        failures: dict[SegmentSync, GdsStoreError] = {}
        late: dict[int, SegmentSync] = {}  # the one of each volume that the others wait for
        for sync in syncs:
            volume = sync.segment.volume
            try:
                result_by(sync.future, deadline)
            except DeadlineError:
                failures[sync] = DeadlineError(
                    "a drive did not end an fdatasync in time: pages of the last seconds may not be durable; "
                    "sync again when it answers",
                    path=str(volume.path),
                )
                late[volume.index] = min(late.get(volume.index, sync), sync, key=lambda each: each.since)
            except OSError as error:
                failures[sync] = refused(error)
        for sync in late.values():
            self._late(sync.segment, sync.since)
        return failures


def refused(failure: OSError) -> VolumeError:
    return VolumeError("fdatasync failed: pages of the last seconds may not be durable", errno=failure.errno)

"""The thread that moves the bounce engine's groups on, so that the drive has its next group while the last one is copied.

One thread is enough, since it never waits for a drive or a device: it asks. It is there at all because calls of the CUDA driver
can be held up by others in the process, and waits must not be.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from gdsstore.engines.base import Op
from gdsstore.engines.bounce_group import Gear, Group, Stage
from gdsstore.engines.pace import PAUSE_MAX_S, PAUSE_MIN_S, Pace
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.memory.lease import Lease

log = logging.getLogger("gdsstore.engines")

MAX_GROUPS = 128  # of a drive; each look asks after all of them
STUCK_S = 0.5
LEFT_BEHIND_S = 0.05  # between looks after what hung when the engine was closed
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, of cuda.h


class Pump:
    """Starts groups, first come first served for each drive, as the arena has room."""

    def __init__(self, gear: Gear) -> None:
        self._gear = gear
        self._change = threading.Condition()
        self._arrived: deque[Group] = deque()
        self._woken = self._closing = self._given_up = False
        self._thread: threading.Thread | None = None
        # From here on the thread's own.
        self._queues: dict[int, deque[Group]] = {}  # by drive
        self._active: list[_Flight] = []
        self._pace = Pace()
        self._patience = PAUSE_MIN_S
        self._broken = 0

    def put(self, groups: list[Group]) -> None:
        """Raises EngineError where nothing can be started."""
        with self._change:
            if self._closing:
                raise EngineError("the bounce engine is closed: open the store again")
            if self._thread is None:
                self._thread = _started(self._serve)
            self._arrived.extend(groups)
            self._wake()

    def look(self) -> None:
        """Look after everything soon: something was cancelled."""
        with self._change:
            self._wake()

    def close(self, timeout_s: float) -> bool:
        """Wait for everything; whether it has ended. What has not begun after `timeout_s` is not begun any more."""
        with self._change:
            self._closing = True
            self._wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._change:
            self._given_up = True
            self._wake()
        return (self._thread is None or not self._thread.is_alive()) and not self._broken

    def _wake(self) -> None:
        self._woken = True
        self._change.notify()

    # All below: in the thread.

    def _serve(self) -> None:
        # While a graph is captured anywhere, to ask after an event would break that in all threads but relaxed ones.
        relaxed = ctypes.c_int(_RELAXED)
        self._gear.device.ask(lambda cuda: cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed)))
        called_off = False
        while self._sleep():
            if self._given_up and not called_off:
                called_off = True
                self._call_off()
            before = self._active
            self._active = [flight for flight in before if self._goes_on(flight)]
            if len(self._active) < len(before):
                self._pace.looked(sum(flight.group.nbytes for flight in self._active))
            self._start_queued()

    def _sleep(self) -> bool:
        """Until there may be something to do; False when there never will be again."""
        with self._change:
            idle = not self._active and not any(self._queues.values()) and not self._arrived
            if idle and self._closing:
                return False
            if not self._woken:
                self._change.wait(None if idle else self._pause_s())
            self._woken = False
            while self._arrived:
                group = self._arrived.popleft()
                self._queues.setdefault(group.drive, deque()).append(group)
        return True

    def _pause_s(self) -> float:
        if self._given_up:
            return LEFT_BEHIND_S
        if not self._active:
            return PAUSE_MAX_S
        pause_s = self._pace.pause_s(self._active[0].group.nbytes)
        if any(flight.stage is Stage.COPY for flight in self._active):  # much faster than a drive
            pause_s = min(pause_s, self._patience)
            self._patience = min(2 * self._patience, PAUSE_MAX_S)
        return pause_s

    def _goes_on(self, flight: _Flight) -> bool:
        try:
            stage = next(flight.steps, None)
        except (
            Exception
        ):  # others' groups must go on; this one's memory stays in quarantine, and its transfer under way
            log.exception("a group of %d bytes failed in a way that nobody foresaw", flight.group.nbytes)
            self._broken += 1
            return False
        if stage is not flight.stage:
            flight.stage, flight.since = stage, time.monotonic()
            self._patience = PAUSE_MIN_S
        return stage is not None

    def _start_queued(self) -> None:
        for drive, queue in self._queues.items():
            while queue:
                group = queue[0]
                if not group.owner.cancelled:
                    if not self._may_start(drive, group.nbytes):
                        break
                    lease = self._lease(group.nbytes)
                    if lease is None:
                        break
                    self._start(group, lease)
                queue.popleft()

    def _may_start(self, drive: int, nbytes: int) -> bool:
        """Each drive has a share of the arena, and one share is for what is being copied. What hangs does not count, so that
        the rest of a drive goes on; but it never gets so much that other drives could not."""
        share = self._gear.arena.size_bytes // (1 + len(self._queues))
        late = time.monotonic() - STUCK_S
        mine = [flight for flight in self._active if flight.group.drive == drive and flight.needs_drive]
        fresh = sum(flight.group.nbytes for flight in mine if flight.since > late)
        total = sum(flight.group.nbytes for flight in mine)
        return len(mine) < MAX_GROUPS and (
            total == 0 or (fresh + nbytes <= share and total + nbytes <= 2 * share)
        )

    def _lease(self, nbytes: int) -> Lease | None:
        try:
            return self._gear.arena.lease(nbytes, 0.0)
        except DeadlineError:
            return None

    def _start(self, group: Group, lease: Lease) -> None:
        if not group.owner.claim():
            lease.release()
            return
        flight = _Flight(group, group.move(self._gear, lease))
        self._pace.started(group.nbytes)
        if self._goes_on(flight):
            self._active.append(flight)

    def _call_off(self) -> None:
        queued = {group.owner for queue in self._queues.values() for group in queue}
        for owner in queued | {flight.group.owner for flight in self._active}:
            owner.cancel()


class _Flight:
    """A group under way."""

    __slots__ = ("group", "since", "stage", "steps")

    def __init__(self, group: Group, steps: Iterator[Stage]) -> None:
        self.group, self.steps = group, steps
        self.stage: Stage | None = None
        self.since = time.monotonic()  # when its stage began

    @property
    def needs_drive(self) -> bool:
        """It is with its drive, or on the way there."""
        return self.stage is not Stage.COPY or self.group.op is Op.WRITE


def _started(target: Callable[[], None]) -> threading.Thread:
    # A daemon: a call that hangs in the driver must not keep the process from exiting.
    thread = threading.Thread(target=target, name="gdsstore-bounce", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise EngineError(f"the bounce engine could not start a thread: {error}") from error
    return thread

"""The nixl engine for host memory: io_uring through NIXL's POSIX plugin, with a result for each range.

Plans are cut into parts of at most PART_RANGES, since NIXL submits and reaps no more at a time and gives one status for a whole
transfer. At most `in_flight_ranges` are under way, over all plans; what finds no room waits in one queue, first come first
served. There is no thread for it: whoever waits for a transfer, or asks whether it is done, moves everyone's parts on.

NIXL does not say which range of a part failed. The posix engine then moves each of them once more, and its results count:
reading again is harmless, and so is writing the same bytes to the same place.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, Engine, Op, RangePlan, Transfer
from gdsstore.engines.files import FileTable
from gdsstore.engines.nixl_ring import NixlRing, Progress
from gdsstore.engines.nixl_selftest import self_test
from gdsstore.engines.nixl_transfer import Ints, NixlTransfer, Part
from gdsstore.engines.pace import PAUSE_MAX_S, Pace
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import EngineError
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.engines")

PART_RANGES = 64
# Bytes that the drive is given at a time: half of what there is to do, within these bounds. Some drives (virtio's, of several
# hypervisors) report nothing before they have done all they were given; with everything given at once, no checksum would be
# computed before the end, and with a deep queue at the end, all of the last ones after it.
GIVEN_MIN_BYTES, GIVEN_MAX_BYTES = 4 << 20, 128 << 20
MAX_RANGE_BYTES = 1 << 30  # io_uring moves less than 2 GiB a request
BLAME_THREADS = 2
GLANCE_S = 200e-6
STUCK_S = 0.5
TURN_S = 1e-3  # how long a caller waits for its turn at NIXL before it leaves its parts to whoever has it

_left_behind: list[object] = []  # what the kernel had not let go of at close: Python must not free it, ever


class NixlEngine(Engine):
    """Raises MissingExtraError where NIXL is not installed, EngineError where it does not work on this machine."""

    name = "nixl"

    def __init__(self, in_flight_ranges: int) -> None:
        self._ring, self._blame = self._start_up()
        self._files = FileTable()
        self._turn = threading.Lock()  # for what follows, and for the ring
        self._room = in_flight_ranges
        self._part_ranges = min(PART_RANGES, in_flight_ranges)
        self._active: tuple[Part, ...] = ()
        self._queue: deque[Part] = deque()
        self._queued_bytes = 0
        self._counting = threading.Lock()  # for the queue and its bytes
        self._pace = Pace()
        self._looked_at = 0.0
        self._lost = False
        self.moved_again = 0  # ranges that NIXL failed to move, or could not say of whether it did
        self._closed = self.left_behind = False

    def _start_up(self) -> tuple[NixlRing, Engine]:
        """NIXL, and the engine that finds out which range failed where NIXL does not say it."""
        ring = NixlRing()
        try:
            self_test(ring)
        except EngineError:
            ring.close()
            raise
        return ring, PosixEngine(BLAME_THREADS)

    def _refused(self, plan: RangePlan) -> npt.NDArray[np.bool_]:
        """Which ranges NIXL would refuse, and their whole part with them. Shape (n,)."""
        outside = (plan.file_offset + plan.length > self._files.sizes(plan.fd)) | (plan.file_offset < 0)
        return outside | (plan.length > MAX_RANGE_BYTES)

    def _moved_by_nixl(self, op: Op, plan: RangePlan) -> None:
        """Told of each part that NIXL moved whole."""

    def attach(self, fd: int, size: int) -> None:
        self._files.add(fd, size)
        try:
            self._blame.attach(fd, size)
            self._ring.attach(fd, size)
        except BaseException:
            self.detach(fd)
            raise

    def detach(self, fd: int) -> None:
        self._files.discard(fd)
        self._blame.detach(fd)
        self._ring.detach(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        if self._closed:
            raise EngineError(f"the {self.name} engine is closed: open the store again")
        transfer = NixlTransfer(self, op, plan)
        odd = self._refused(plan)
        if odd.any():
            parts = self._cut(transfer, np.flatnonzero(~odd))
            parts += self._cut(transfer, np.flatnonzero(odd), blame=True)
        else:
            parts = self._cut(transfer, None)
        transfer.expect(len(parts))
        self._put(parts)
        self.advance(TURN_S)
        return transfer

    def _cut(self, owner: NixlTransfer, index: Ints | None, *, blame: bool = False) -> list[Part]:
        """Parts of all of a plan, or of the ranges `index`."""
        n, size = len(owner.plan if index is None else index), self._part_ranges
        cuts = [slice(at, min(at + size, n)) for at in range(0, n, size)]
        return [Part(owner, cut if index is None else index[cut], blame) for cut in cuts]

    def advance(self, timeout_s: float = 0.0) -> None:
        """Look after everything that is under way, and start what there is room for. Leaves it to another thread that is
        already at it."""
        if not self._turn.acquire(timeout=timeout_s):
            return
        try:
            self._looked_at = time.monotonic()
            self._reap()
            if self._queue:
                self._start_queued()
        finally:
            self._turn.release()

    def _put(self, parts: list[Part]) -> None:
        with self._counting:
            self._queue.extend(parts)
            self._queued_bytes += sum(part.nbytes for part in parts)

    def _start_queued(self) -> None:
        # What takes far too long is not counted: a drive that hangs does not keep the others from working.
        late = time.monotonic() - STUCK_S
        given = sum(part.nbytes for part in self._active if part.since > late)
        while self._queue:
            part = self._queue[0]
            limit = GIVEN_MAX_BYTES
            if part.owner.op is Op.READ:  # nothing is left to do with what was written
                limit = min(max((self._queued_bytes + given) // 2, GIVEN_MIN_BYTES), limit)
            fits = len(part.plan) <= self._room and (given == 0 or given + part.nbytes <= limit)
            if not (fits or part.owner.cancelled):
                break
            with self._counting:
                self._queue.popleft()
                self._queued_bytes -= part.nbytes
            if part.owner.claim():
                given += part.nbytes
                self._start(part)

    def glance(self) -> None:
        """`advance`, unless that was a moment ago: one look serves whoever asks about many transfers in a row."""
        if time.monotonic() - self._looked_at >= GLANCE_S:
            self.advance()

    def _start(self, part: Part) -> None:
        part.since = time.monotonic()
        self._room -= len(part.plan)
        self._active = (*self._active, part)
        self._pace.started(part.nbytes)
        if part.blame or self._lost:
            self._move_again(part)
            return
        try:
            part.request = self._ring.start(part.owner.op, part.plan)
        except EngineError as error:
            log.warning("%d ranges go through %s: %s", len(part.plan), self._blame.name, str(error))
            self._move_again(part)
            return
        if part.request.progress is Progress.LOST:
            # It stays active, and its memory quarantined, for good; its room is needed.
            log.error("%s engine: everything goes through %s from now on", self.name, self._blame.name)
            self._lost = True
            self._room += len(part.plan)

    def _move_again(self, part: Part) -> None:
        try:
            part.again = self._blame.submit(part.owner.op, part.plan)
            if part.owner.cancelled:  # meanwhile, and `cancel_again` may have come before
                part.again.wait(0.0)
        except EngineError as error:
            log.error("%d ranges fail: %s", len(part.plan), str(error))
            self._end(part, 0, errno.EIO)

    def cancel_again(self, owner: NixlTransfer) -> None:
        """Of what is being moved again for a transfer, nothing is begun any more."""
        for part in self._active:
            if part.owner is owner and part.again is not None:
                part.again.wait(0.0)

    def _reap(self) -> None:
        before = self._active
        for part in before:
            if part.again is None and part.request is not None:
                progress = self._ring.poll(part.request)
                if progress is Progress.MOVED:
                    self._moved_by_nixl(part.owner.op, part.plan)
                    self._end(part, part.plan.length, 0)
                elif progress is Progress.FAILED and part.owner.cancelled:
                    self._end(
                        part, 0, errno.ETIMEDOUT
                    )  # moved again, it would come when the memory is somebody else's
                elif progress is Progress.FAILED:
                    if self.moved_again == 0:
                        log.warning(
                            "a NIXL transfer failed: %s moves its ranges again (said once)", self._blame.name
                        )
                    self.moved_again += len(part.plan)
                    self._move_again(part)
            elif part.again is not None and part.again.done:
                results = part.again.wait(0.0)
                self._end(part, results.moved, results.errno)
        if self._active != before:
            self._pace.looked(sum(part.nbytes for part in self._active))

    def _end(self, part: Part, moved: I64 | int, code: I32 | int) -> None:
        self._active = tuple(other for other in self._active if other is not part)
        self._room += len(part.plan)
        part.owner.end(part, moved, code)

    def pause_s(self, nbytes: int) -> float:
        """How long to wait before the next look, for who waits for `nbytes` to move. Never past the end of the oldest part:
        there may be something to start then."""
        active = self._active
        return self._pace.pause_s(min(nbytes, active[0].nbytes) if active else nbytes)

    def close(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        if self._closed:
            return
        self._closed = True
        self.advance(TURN_S)
        while (self._active or self._queue) and not deadline.passed:
            time.sleep(min(PAUSE_MAX_S, deadline.left_s))
            self.advance()
        for part in list(self._queue):
            part.owner.cancel()
        if self._active or not self._turn.acquire(timeout=TURN_S):
            log.warning(
                "%s engine: %d transfers had not ended %.1f s after close; left to the kernel with their memory",
                self.name,
                len(self._active),
                timeout_s,
            )
            self.left_behind = True
            _left_behind.append(self)
            return
        # The turn is kept: nobody may come to the ring any more.
        self._ring.close()
        self._blame.close(deadline.left_s)

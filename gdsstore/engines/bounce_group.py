"""One group of the bounce engine on its way through pinned memory, between its drive and the device."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gdsstore.engines.base import I32, I64, U64, Engine, Op, RangePlan
from gdsstore.engines.bounce_copies import Copies, reachable
from gdsstore.engines.bounce_cut import Ints, room
from gdsstore.engines.bounce_files import BounceFiles
from gdsstore.engines.bounce_transfer import BounceTransfer
from gdsstore.engines.device import Registered
from gdsstore.engines.paths import Path, PathCounters
from gdsstore.errors import EngineError
from gdsstore.memory.arena import Arena
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.lease import Lease
from gdsstore.memory.streams import Stream

log = logging.getLogger("gdsstore.engines")


@dataclass(frozen=True, slots=True)
class Gear:
    """What groups move with. `streams`: one for each direction, as a device has a copy engine for each."""

    inner: Engine
    files: BounceFiles
    arena: Arena
    device: CudaDevice
    streams: dict[Op, Stream]
    registered: Registered
    moved: PathCounters


class Stage(Enum):
    DRIVE = "drive"  # between the drive and the lease
    COPY = "copy"  # between the lease and the device


class Group:
    """Some pieces of a transfer, all on one drive. `nbytes`: what they take of the arena."""

    def __init__(self, owner: BounceTransfer, drive: int, index: Ints) -> None:
        self.owner, self.drive, self._index = owner, drive, index
        self.op = owner.op
        self._plan = owner.pieces.plan.take(index)
        taken = room(self._plan.length)
        self._offset = np.cumsum(taken) - taken  # in the lease
        self.nbytes = int(taken.sum())
        # How far each piece has come: bytes that its last stage moved.
        self._moved: I64 = self._plan.length.copy()
        self._errno: I32 = np.zeros(len(index), np.int32)

    def move(self, gear: Gear, lease: Lease) -> Iterator[Stage]:
        """Yields where it is for as long as it is under way; has told its owner the results once it has ended. Never blocks.

        A group that is left in the middle, or ends in an exception, keeps its lease: somebody may still use the memory.
        """
        host = np.uint64(lease.address) + self._offset.astype(np.uint64)
        foreign = ~reachable(gear.device, gear.registered, self._plan.address, self._plan.length)
        self._moved[foreign], self._errno[foreign] = 0, errno.EFAULT
        stages = [self._through_drive(gear, host), self._copy(gear, host)]
        for stage in stages if self.op is Op.READ else reversed(stages):
            if self.owner.cancelled:  # the memory, or the place in the file, is somebody else's soon
                self._moved[:] = 0
                self._errno[self._errno == 0] = errno.ETIMEDOUT
                break
            yield from stage
        lease.release()
        self._count(gear.moved)
        self.owner.end(self._index, self._moved, self._errno)

    def _through_drive(self, gear: Gear, host: U64) -> Iterator[Stage]:
        openings = gear.files.openings(self._plan)
        refused = (openings.errno != 0) & (self._errno == 0)
        self._moved[refused], self._errno[refused] = 0, openings.errno[refused]
        which = np.flatnonzero(self._errno == 0)
        if len(which):
            yield from self._submit(gear.inner, which, openings.fd, host)
        openings.close()

    def _submit(self, inner: Engine, which: Ints, fd: I32, host: U64) -> Iterator[Stage]:
        plan = self._plan.take(which)
        plan = RangePlan(fd[which], plan.file_offset, host[which], plan.length)
        try:
            transfer = inner.submit(self.op, plan)
        except EngineError as error:
            log.error("%d ranges fail: %s", len(which), str(error))
            self._moved[which], self._errno[which] = 0, errno.EIO
            return
        called_off = False
        while not transfer.done:
            if self.owner.cancelled and not called_off:
                called_off = True
                transfer.wait(0.0)  # begins nothing more
            yield Stage.DRIVE
        results = transfer.wait(0.0)
        self._moved[which], self._errno[which] = results.moved, results.errno

    def _copy(self, gear: Gear, host: U64) -> Iterator[Stage]:
        which = np.flatnonzero(self._moved > 0)  # also what came before an error
        if len(which) == 0:
            return
        device, nbytes = self._plan.address[which], self._moved[which]
        to, at = (device, host[which]) if self.op is Op.READ else (host[which], device)
        copies = Copies(gear.streams[self.op], to, at, nbytes)
        while not copies.ended:
            yield Stage.COPY
        failed = which[copies.failed]
        self._moved[failed], self._errno[failed] = 0, errno.EFAULT  # EIO would be the drive's fault

    def _count(self, moved: PathCounters) -> None:
        for fd in np.unique(self._plan.fd).tolist():
            mine = self._moved[self._plan.fd == fd]
            nbytes, operations = int(mine.sum()), int(np.count_nonzero(mine))
            moved.add(self.op, Path.BOUNCE, nbytes, fd, operations=operations, label=self._plan.label)

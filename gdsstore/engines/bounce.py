"""The bounce engine: device memory <-> files through pinned host memory of ours, and an engine for host memory.

For machines without a direct path, and those where it is slower. A plan is cut into groups; while one is copied between host and
device, the drive works on others. Room in the arena bounds what is under way: the rest of a plan waits for it.
"""

from __future__ import annotations

import logging
from typing import Any

from gdsstore.engines.base import Engine, Op, RangePlan, Transfer
from gdsstore.engines.bounce_cut import groups
from gdsstore.engines.bounce_files import BounceFiles
from gdsstore.engines.bounce_group import Gear, Group
from gdsstore.engines.bounce_pump import Pump
from gdsstore.engines.bounce_transfer import BounceTransfer
from gdsstore.engines.device import DeviceEngine, Registered
from gdsstore.engines.paths import Path, PathCounters
from gdsstore.errors import ConfigError, EngineError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory.arena import Arena, Grant
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.streams import Stream
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.engines")

GROUP_BYTES = 4 << 20  # costs a copy engine some 0.1 ms, as much as the Python work for it
GROUPS_IN_ARENA = 8  # at the least: half of them with the drive, in turn, while others are copied
MIN_ARENA_BYTES = GROUPS_IN_ARENA * ALIGNMENT

_left_behind: list[object] = []  # what a drive or device that hangs still uses: Python must not free it, ever


class BounceEngine(DeviceEngine):
    """Reads and writes with `inner`, an engine for host memory, which it closes with itself.

    `arena_bytes` of host memory are taken and page-locked at once, on `numa_node` (-1: wherever). `grant` tells what was
    granted: without `grant.pinned` all is right but slow, as copies then do not overlap with the drive.

    Initialises CUDA on `device`. Raises ConfigError for an arena that is too small, DeviceError where there is no such device,
    ArgumentError where there is no such node, StoreError or DeadlineError where the host has not that much memory. `inner` is
    the caller's then.
    """

    name = "bounce"

    def __init__(
        self,
        inner: Engine,
        *,
        device: int = 0,
        arena_bytes: int = 128 << 20,
        numa_node: int = -1,
        cuda_driver: Any | None = None,
    ) -> None:
        if arena_bytes < MIN_ARENA_BYTES:
            raise ConfigError(
                f"the bounce engine's arena has at least {MIN_ARENA_BYTES} bytes", arena_bytes=arena_bytes
            )
        self.inner = inner
        self.device = device
        self.path = Path.BOUNCE
        self.moved = PathCounters()
        self.moved_again = 0  # there is no better way to begin with
        self.registered = Registered()
        # First the device: memory can be pinned only where CUDA is initialised.
        self._cuda = CudaDevice(device, cuda_driver)
        try:
            self._arena = Arena(arena_bytes, numa_node=numa_node, cuda_driver=cuda_driver)
        except BaseException:
            self._cuda.close()
            raise
        try:
            self._streams = {op: Stream(self._cuda) for op in Op}
        except BaseException:
            self._arena.close(0.0)
            self._cuda.close()
            raise
        self.grant: Grant = self._arena.grant
        if not self.grant.pinned:
            log.warning("the bounce engine's memory is not pinned: %s", "; ".join(self.grant.notes))
        self._group_bytes = min(GROUP_BYTES, arena_bytes // GROUPS_IN_ARENA // ALIGNMENT * ALIGNMENT)
        self._files = BounceFiles(inner)
        self._pump = Pump(
            Gear(inner, self._files, self._arena, self._cuda, self._streams, self.registered, self.moved)
        )
        self._left_behind = self._freed = False

    def attach(self, fd: int, size: int) -> None:
        self._files.attach(fd, size)

    def detach(self, fd: int) -> None:
        self._files.detach(fd)

    def register(self, address: int, nbytes: int) -> None:
        """Its addresses need not be looked up any more; nothing else is done."""
        self.registered.add(address, nbytes)
        if not self._cuda.holds(address, nbytes):
            self.registered.discard(address)
            raise EngineError("not memory of this device", address=hex(address), device=self.device)

    def deregister(self, address: int) -> None:
        if self._left_behind:
            raise EngineError("a copy that hangs may still use the memory", address=hex(address))
        self.registered.discard(address)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        transfer = BounceTransfer(op, plan, self._group_bytes, self._pump.look)
        pieces = transfer.pieces.plan
        cuts = groups(self._files.drives(pieces.fd), pieces.length, self._group_bytes)
        queued = [Group(transfer, drive, index) for drive, index in cuts]
        transfer.expect(len(queued))
        self._pump.put(queued)
        return transfer

    def close(self, timeout_s: float) -> None:
        if self._freed:
            return
        deadline = Deadline(timeout_s)
        ended = self._pump.close(timeout_s)
        self.inner.close(deadline.left_s)
        if not ended:
            log.warning("bounce engine: not all had ended %.1f s after close; its memory stays", timeout_s)
            if not self._left_behind:
                self._left_behind = True
                _left_behind.append(self)
            return
        self._left_behind = False
        self._freed = True
        for stream in self._streams.values():
            stream.close()
        self._arena.close(deadline.left_s)
        self._cuda.close()

"""Tries sick volumes until they answer again: by small transfers of its own, so that no call has to wait for a drive that hangs."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gdsstore.catalog.records import SegmentState
from gdsstore.engines.base import Op, RangePlan
from gdsstore.errors import GdsStoreError
from gdsstore.memory.arena import Arena
from gdsstore.transfer.mover import NO_SPACE, STALL_S
from gdsstore.volume.health import Breaker, VolumeHealth
from gdsstore.volume.volume import Volume
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.store_core import StoreCore

log = logging.getLogger("gdsstore.store")

PROBE_BYTES = 4096
LOOK_S = 0.25  # how often to look, while a volume is sick, whether it is to be tried
NOT_THE_DRIVE = (*NO_SPACE, errno.ENOENT)  # it has answered


class SickVolumes:
    """For the one thread that calls `look`. A volume is tried in a thread of its own, since whatever touches it may hang there."""

    def __init__(self, store: StoreCore) -> None:
        self._store = store
        self._stop = threading.Event()
        self._trying: dict[tuple[Op, int], threading.Thread] = {}

    def look(self) -> bool:
        """Try what is due; whether there are sick volumes. Does not wait."""
        sick = False
        if self._stop.is_set():
            return sick
        for op, volumes in self._store.health.items():
            for index, health in enumerate(volumes):
                if health.breaker is Breaker.CLOSED:
                    continue
                sick = True
                last = self._trying.get((op, index))
                # One at a time: what hangs may keep a thread of the engine busy that the other volumes need.
                if (last is None or not last.is_alive()) and health.allows(write=False):
                    self._try(op, self._store.volumes[index], health)
        return sick

    def _try(self, op: Op, volume: Volume, health: VolumeHealth) -> None:
        thread = threading.Thread(
            target=self._probe, args=(op, volume, health), name=f"gdsstore-probe-{volume.index}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("a sick volume could not be tried: %s", error)
            return
        self._trying[op, volume.index] = thread

    def stop(self, timeout_s: float) -> None:
        """Start nothing more, and wait for what is under way."""
        self._stop.set()
        deadline = Deadline(timeout_s)
        for thread in list(self._trying.values()):
            thread.join(deadline.left_s)

    # --- in the threads ---

    def _probe(self, op: Op, volume: Volume, health: VolumeHealth) -> None:
        start, fd, let_go = time.monotonic(), -1, True
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | volume.direct.flags
        try:
            if op is Op.READ:
                fd = os.open(volume.segment_path(self._segment(volume)), flags)
            else:  # what is stored is not written again: another process may be writing there
                fd = os.open(_own_file(volume), flags | os.O_CREAT, 0o600)
                os.posix_fallocate(fd, 0, PROBE_BYTES)
            let_go = self._move(op, fd, health)
        except OSError as error:
            ok = error.errno in NOT_THE_DRIVE
            health.record(ok=ok, nbytes=0, seconds=time.monotonic() - start)
        except GdsStoreError as error:  # nothing was learned; it is tried again
            log.error("a sick volume could not be tried: %s", error)
        finally:
            if fd >= 0 and let_go:  # closed under a transfer, its number could become another file's
                os.close(fd)
            if op is Op.WRITE:
                with contextlib.suppress(OSError):
                    _own_file(volume).unlink()

    def _segment(self, volume: Volume) -> int:
        """One of those on the volume, another one each time: the trouble may be in one place only."""
        with self._store.catalog.read() as txn:
            rows = self._store.catalog.segments(txn)
        lost = SegmentState.LOST
        mine = [row.segment_id for row in rows if row.volume == volume.index and row.state is not lost]
        return random.choice(mine) if mine else 0

    def _move(self, op: Op, fd: int, health: VolumeHealth) -> bool:
        """Move a block, and say how that went. Whether the engine has let go of the file."""
        engine = self._store.moving().engine
        stall_s = min(STALL_S, self._store.config.io_deadline_s)
        arena = Arena(PROBE_BYTES, huge_pages="off", pin="off")
        lease = arena.lease(PROBE_BYTES, timeout_s=0.0)
        blocks = os.fstat(fd).st_size // PROBE_BYTES
        plan = RangePlan(
            np.array([fd], np.int32),
            np.array([random.randrange(blocks) * PROBE_BYTES], np.int64),
            np.array([lease.address], np.uint64),
            np.array([PROBE_BYTES], np.int64),
        )
        engine.attach(fd, blocks * PROBE_BYTES)
        start = time.monotonic()
        transfer = engine.submit(op, plan)
        ok = bool(transfer.wait(stall_s).complete(plan)[0])
        late = not transfer.done
        health.record(ok=ok, nbytes=PROBE_BYTES * ok, seconds=time.monotonic() - start, timed_out=late)
        lease.quarantine(lambda: transfer.done)
        while not transfer.done and not self._stop.wait(LOOK_S):
            pass
        arena.close(0.0)
        if transfer.done:
            engine.detach(fd)
        return transfer.done


def _own_file(volume: Volume) -> Path:
    return volume.directory / f".probe-{os.getpid()}-{volume.index}"

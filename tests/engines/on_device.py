"""An engine for device memory, dressed up as one for host memory: so that one suite of tests holds for all engines.

A plan's host ranges are mirrored in device memory, with the same alignment and the same bytes, also those that a READ is to
overwrite. What the engine did to them is copied back once the transfer is done, and not before.
"""

from __future__ import annotations

import numpy as np

from gdsstore.engines.base import Engine, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.device import DeviceEngine
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.memory.lease import Lease

BLOCK = 4096
ARENA_BYTES = 64 << 20


class OnDevice(Engine):
    def __init__(self, inner: DeviceEngine) -> None:
        self.name = inner.name
        self.inner = inner
        self.cuda = CudaDevice(inner.device)
        self._submitted: list[_Transfer] = []
        self._closed = False
        self._arena = DeviceArena(ARENA_BYTES, device=inner.device, registrars=[inner])

    def attach(self, fd: int, size: int) -> None:
        self.inner.attach(fd, size)

    def detach(self, fd: int) -> None:
        self.inner.detach(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        if self._closed:
            return self.inner.submit(op, plan)
        skew = (plan.address % BLOCK).astype(np.int64)
        whole = -(-(plan.length + skew) // BLOCK) * BLOCK
        lease = self._arena.lease(int(whole.sum()) + BLOCK, 60.0)
        mirror = np.uint64(lease.address) + (np.cumsum(whole) - whole + skew).astype(np.uint64)
        mirror[plan.address == 0] = 0
        mirrored = RangePlan(plan.fd, plan.file_offset, mirror, plan.length)
        for to, at, length in _ranges(mirrored.address, plan.address, plan.length):
            self.cuda.copy(to, at, length)
        try:
            transfer = _Transfer(self, self.inner.submit(op, mirrored), lease, op, plan, mirrored)
        except BaseException:
            lease.release()
            raise
        self._submitted.append(transfer)
        return transfer

    def close(self, timeout_s: float) -> None:
        self._closed = True
        self.inner.close(timeout_s)
        for transfer in self._submitted:
            _ = transfer.done
        self._arena.close(timeout_s)
        self.cuda.close()


def _ranges(*columns: np.ndarray) -> list[list[int]]:
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [list(row) for row in rows if row[0] and row[1]]


class _Transfer(Transfer):
    def __init__(
        self, owner: OnDevice, inner: Transfer, lease: Lease, op: Op, plan: RangePlan, mirrored: RangePlan
    ) -> None:
        self.inner = inner
        self._owner, self._lease, self._op = owner, lease, op
        self._plan, self._mirrored = plan, mirrored
        self.copied = False

    @property
    def done(self) -> bool:
        if not self.inner.done:
            return False
        if not self.copied:
            self.copied = True
            if self._op is Op.READ:
                for to, at, length in _ranges(self._plan.address, self._mirrored.address, self._plan.length):
                    self._owner.cuda.copy(to, at, length)
            self._lease.release()
        return True

    def wait(self, timeout_s: float) -> RangeResults:
        results = self.inner.wait(timeout_s)
        _ = self.done
        return results

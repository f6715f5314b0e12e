"""Gather, scatter and sums without kernels: copies by the driver, and the sums on the host from a pinned copy.

Slow where pages have many small pieces, as each run of bytes is a call of the driver's; it needs nothing else, though.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.host import raw_sums
from gdsstore.errors import DeviceError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.transfer.scatter_memory import Scratch, ScratchPool
from gdsstore.transfer.scatter_pending import Pending
from gdsstore.transfer.scatter_work import PageKernels, Records

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class CopyKernels(PageKernels):
    """Works on every device, and for every layout."""

    name = "copies"

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._pool = ScratchPool(device, mirrored=False)

    def _gather(self, pending: Pending, records: Records) -> None:
        inside = _inside(records)
        self._copy(inside, records.piece, records.length)
        payload = records.length.sum(axis=1)
        padding = records.record_bytes - payload
        for i in np.flatnonzero(padding).tolist():
            self._stream.zero(int(records.record[i]) + int(payload[i]), int(padding[i]))
        self._sum_records(pending, records)

    def _scatter(self, pending: Pending, records: Records) -> None:
        self._copy(records.piece, _inside(records), records.length)
        self._sum_records(pending, records)

    def _sum_records(self, pending: Pending, records: Records) -> None:
        whole = np.full((len(records), 1), records.record_bytes, np.int64)
        self._sum(pending, records.record[:, None], whole, np.full_like(whole, records.first_block))

    def _sum(self, pending: Pending, address: U64, length: I64, first_block: I64) -> None:
        total = int(length.sum())
        scratch = pending.keep(self._pool.take(total))
        flat = length.ravel()
        to = np.uint64(scratch.host) + (np.cumsum(flat) - flat).astype(np.uint64)
        self._copy(to, address, length, to_host=True)
        length, first_block = length.copy(), first_block.copy()  # the caller's, who may change them by then
        pending.read(lambda: _host_sums(scratch, to, length, first_block))

    def _copy(self, to: U64, at: U64, length: I64, *, to_host: bool = False) -> None:
        """Queue copies of `length` bytes each, the three arrays of as many elements."""
        there = length.ravel() > 0
        to, at, length = to.ravel()[there], at.ravel()[there], length.ravel()[there]
        if len(length) == 0:
            return
        first: list[int] = []
        for start, end in pairwise(runs(to, at, length)):
            sides = [at[start]] if to_host else [at[start], to[start]]
            nbytes = int(length[start:end].sum())
            whole = end == start + 1 or all(self._allocated_as_one(int(side), nbytes) for side in sides)
            first.extend([start] if whole else range(start, end))
        errors = self._stream.copy_each(to[first], at[first], np.add.reduceat(length, first))
        if errors.any():
            raise DeviceError(
                "the driver refused a copy", cuda_error=int(errors.max()), device=self._device.ordinal
            )

    def _allocated_as_one(self, address: int, nbytes: int) -> bool:
        """The driver refuses copies across allocations, which may touch by chance."""
        try:
            base, size = self._device.allocation_of(address)
        except DeviceError:
            return False
        return address + nbytes <= base + size

    def _free(self) -> None:
        self._pool.close()


def _host_sums(scratch: Scratch, address: U64, length: I64, first_block: I64) -> U64:
    """`scratch` is an argument so that it lives as long as its bytes are read."""
    sums = raw_sums(address, length.ravel(), first_block.ravel()).reshape(length.shape)
    return np.asarray(sums.sum(axis=1, dtype=np.uint64), np.uint64)


def _inside(records: Records) -> U64:
    """Where the pieces lie inside the records: addresses, shape (n, k)."""
    offset = np.cumsum(records.length, axis=1) - records.length
    return np.asarray(records.record[:, None] + offset.astype(np.uint64), np.uint64)


def runs(to: U64, at: U64, length: I64) -> list[int]:
    """Which of m > 0 copies can be made as one, where they touch on both sides: run i is copies [bounds[i], bounds[i + 1])."""
    step = length[:-1].astype(np.uint64)
    apart = (to[1:] != to[:-1] + step) | (at[1:] != at[:-1] + step)
    return [0, *(np.flatnonzero(apart) + 1).tolist(), len(length)]

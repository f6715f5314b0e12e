"""Pages in host memory: staged through an arena where they are not aligned, checksummed by the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.host import raw_sums
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory.arena import Arena, Lease
from gdsstore.memory.copying import copy_ranges, zero_ranges
from gdsstore.memory.views import PageMemory
from gdsstore.transfer.checked_copy import copy_checked
from gdsstore.transfer.flight import U64, Flight, Ints, Side, first_blocks
from gdsstore.waiting import Deadline


class HostSide(Side):
    """`memory_alignment`: bytes, what the drives ask of addresses. `zero_copy` off: all pages go through the arena."""

    def __init__(self, arena: Callable[[], Arena], memory_alignment: int, zero_copy: bool) -> None:
        self._arena = arena
        self._alignment, self._zero_copy = memory_alignment, zero_copy

    def in_place(self, memory: PageMemory, record_bytes: int) -> npt.NDArray[np.bool_]:
        if not self._zero_copy:
            return np.zeros(len(memory), np.bool_)
        return np.asarray(memory.direct(self._alignment) & (memory.page_bytes == record_bytes), np.bool_)

    def lease(self, nbytes: int, timeout_s: float) -> Lease:
        return self._arena().lease(nbytes, timeout_s)

    def prepare(self, flight: Flight, deadline: Deadline) -> None:
        if flight.op is not Op.WRITE or flight.lease is None:
            return
        _copy(flight, np.arange(len(flight.staged)), to_lease=True)
        used = flight.memory.page_bytes[flight.staged]
        padded = np.flatnonzero(used < flight.record_bytes)
        if len(padded):
            start = flight.address[flight.staged[padded], 0] + used[padded].astype(np.uint64)
            zero_ranges(start, flight.record_bytes - used[padded])

    def raw_checksums(self, flight: Flight, pages: Ints, deadline: Deadline) -> U64:
        if flight.op is not Op.READ or flight.lease is None or flight.scattered:
            return self._sums(flight, pages)
        if deadline.passed:  # the memory may be somebody else's by now
            raise DeadlineError("no time is left to put pages in place")
        # Wrong pages are put in place too, and found out by their sums: one pass, and their memory is worth nothing anyway.
        flight.scattered = True
        staged = np.isin(pages, flight.staged)
        sums = np.zeros(len(pages), np.uint64)
        sums[~staged] = self._sums(flight, pages[~staged])
        mine = pages[staged]
        sums[staged] = copy_checked(
            flight.address[mine, 0],
            flight.record_bytes,
            flight.memory.address[mine],
            flight.memory.length[mine],
            flight.first_block,
        )
        return sums

    def _sums(self, flight: Flight, pages: Ints) -> U64:
        address, length = flight.address[pages], flight.length[pages]
        sums = raw_sums(
            np.ascontiguousarray(address.ravel()),
            np.ascontiguousarray(length.ravel()),
            np.ascontiguousarray((first_blocks(length, ALIGNMENT) + flight.first_block).ravel()),
        )
        return np.asarray(sums.reshape(address.shape).sum(axis=1, dtype=np.uint64), np.uint64)

    def scatter(self, flight: Flight, pages: Ints, deadline: Deadline) -> None:
        if flight.lease is not None and not flight.scattered:
            _copy(flight, np.flatnonzero(np.isin(flight.staged, pages)), to_lease=False)

    def bring(
        self,
        address: U64,
        memory: PageMemory,
        record_bytes: int,
        deadline: Deadline,
        sums: U64 | None = None,
        first_block: int = 0,
    ) -> None:
        if deadline.passed:  # the memory may be somebody else's by now
            raise DeadlineError("no time is left to copy pages")
        if sums is not None:
            sums[:] = copy_checked(address, record_bytes, memory.address, memory.length, first_block)
            return
        inside = address[:, None] + (np.cumsum(memory.length, axis=1) - memory.length).astype(np.uint64)
        copy_ranges(
            np.ascontiguousarray(inside.ravel()),
            np.ascontiguousarray(memory.address.ravel()),
            np.ascontiguousarray(memory.length.ravel()),
        )


def _copy(flight: Flight, positions: Ints, *, to_lease: bool) -> None:
    pages = flight.staged[positions]
    length = flight.memory.length[pages]
    inside = flight.address[pages, :1] + (np.cumsum(length, axis=1) - length).astype(np.uint64)
    outside = flight.memory.address[pages]
    source, destination = (outside, inside) if to_lease else (inside, outside)
    copy_ranges(
        np.ascontiguousarray(source.ravel()),
        np.ascontiguousarray(destination.ravel()),
        np.ascontiguousarray(length.ravel()),
    )

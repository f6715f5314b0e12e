"""Host memory, with sealed pages on the way to the drive: what is copied to and from the staging arena elsewhere, is sealed and
opened here. So the drive never sees the caller's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.host import raw_sums
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.layout import align_up
from gdsstore.memory.arena import Arena
from gdsstore.memory.copying import copy_ranges, zero_ranges
from gdsstore.memory.views import PageMemory
from gdsstore.sealing.cipher import OVERHEAD_BYTES, PageCipher
from gdsstore.transfer.flight import U64, Flight, Ints
from gdsstore.transfer.host_side import HostSide
from gdsstore.transfer.results import PageStatus
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")

SLICE_BYTES = 8 << 20  # of a chunk, between two looks at the clock
WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearMemory(PageMemory):
    """The caller's pages in the clear, and under which names they are sealed. `keys`: uint8 (n, 32).

    `clear_bytes`: of each page; memory after them, up to the record's end, is set to zero. `wants_sums`: whoever loads wants the
    raw checksums of the records that the pages in the clear make, not of the sealed ones.
    """

    digest: bytes
    keys: npt.NDArray[np.uint8]
    clear_bytes: int
    wants_sums: bool = False

    @property
    def page_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each sealed page, as the drive has it. Shape (n,)."""
        return np.full(len(self.address), self.clear_bytes + OVERHEAD_BYTES, np.int64)

    def take(self, index: Ints) -> ClearMemory:
        return ClearMemory(
            address=self.address[index],
            length=self.length[index],
            owner=self.owner,
            ready=self.ready,
            digest=self.digest,
            keys=self.keys[index],
            clear_bytes=self.clear_bytes,
            wants_sums=self.wants_sums,
        )


class SealingSide(HostSide):
    """Pages of ClearMemory are sealed. Others can be read as they are on the drive, and not written."""

    def __init__(self, arena: Callable[[], Arena], memory_alignment: int, cipher: PageCipher) -> None:
        super().__init__(arena, memory_alignment, zero_copy=False)  # so that all pages go through the arena
        self._cipher = cipher

    def prepare(self, flight: Flight, deadline: Deadline) -> None:
        if flight.op is not Op.WRITE or len(flight.memory) == 0:
            return
        memory = flight.memory
        if not isinstance(memory, ClearMemory):
            raise EngineError("this store is encrypted, and writes nothing in the clear")
        target = np.ascontiguousarray(flight.address[:, 0])
        if memory.address.shape[1] == 1:
            source = np.ascontiguousarray(memory.address[:, 0])
            self._cipher.seal(memory.digest, memory.keys, source, memory.clear_bytes, target)
        else:
            page = _Scratch(memory.clear_bytes)
            for i in range(len(memory)):
                copy_ranges(memory.address[i], page.pieces(memory.length[i]), memory.length[i])
                self._cipher.seal(
                    memory.digest, memory.keys[i : i + 1], page.address, memory.clear_bytes, target[i : i + 1]
                )
        sealed = memory.page_bytes
        zero_ranges(target + sealed.astype(np.uint64), flight.record_bytes - sealed)

    def raw_checksums(self, flight: Flight, pages: Ints, deadline: Deadline) -> U64:
        return self._sums(flight, pages)  # of the sealed ones: nothing is in place before it is opened

    def scatter(self, flight: Flight, pages: Ints, deadline: Deadline) -> None:
        memory = flight.memory
        if not isinstance(memory, ClearMemory):
            HostSide.scatter(self, flight, pages, deadline)
            return
        step = max(1, SLICE_BYTES // memory.clear_bytes)
        for first in range(0, len(pages), step):
            if deadline.passed:  # the memory may be somebody else's by now
                raise DeadlineError("no time is left to open pages")
            part = pages[first : first + step]
            good, sums = self._open(memory.take(part), np.ascontiguousarray(flight.address[part, 0]))
            flight.status[part[~good]] = PageStatus.MISS_CHECKSUM
            if flight.sums is not None and sums is not None:
                flight.sums[part] = sums
            if not good.all():
                log.error("%d pages were changed on the drive, and not by damage", np.count_nonzero(~good))

    def _open(self, memory: ClearMemory, sealed: U64) -> tuple[npt.NDArray[np.bool_], U64 | None]:
        """Open pages into their memory. Which are good, and what sums are wanted; shapes (n,)."""
        n, clear = len(memory), memory.clear_bytes
        in_one = memory.address.shape[1] == 1
        if in_one and not (memory.wants_sums and not memory.direct(WORD_BYTES).all()):
            target, length = np.ascontiguousarray(memory.address[:, 0]), memory.length[:, 0]
            good = self._cipher.open(memory.digest, memory.keys, sealed, clear, target)
            zero_ranges(target + np.uint64(clear), length - clear)
            sums = raw_sums(target, length, np.zeros(n, np.int64)) if memory.wants_sums else None
            return good, sums
        page = _Scratch(clear)
        good, sums = np.zeros(n, np.bool_), np.zeros(n, np.uint64)
        for i in range(n):
            mine = slice(i, i + 1)
            good[mine] = self._cipher.open(
                memory.digest, memory.keys[mine], sealed[mine], clear, page.address
            )
            if good[i]:
                copy_ranges(page.pieces(memory.length[i]), memory.address[i], memory.length[i])
                if memory.wants_sums:
                    sums[mine] = page.raw_sum()
        return good, sums if memory.wants_sums else None


class _Scratch:
    """One page, for pages that are scattered in the caller's memory: a cipher takes them in one piece. Small enough for a
    core's own cache, mostly."""

    def __init__(self, clear_bytes: int) -> None:
        self._nbytes = align_up(clear_bytes)
        self._words = np.zeros(self._nbytes // WORD_BYTES, np.uint64)
        self.address: U64 = np.array([self._words.ctypes.data], np.uint64)

    def pieces(self, length: npt.NDArray[np.int64]) -> U64:
        """Where pieces of these lengths begin, one behind the other. Shape (k,)."""
        return np.asarray(self.address + (np.cumsum(length) - length).astype(np.uint64), np.uint64)

    def raw_sum(self) -> U64:
        return raw_sums(self.address, np.array([self._nbytes]), np.zeros(1, np.int64))

"""What the results of a chunk say: of the bytes that moved, and of the drives that they are on."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op, RangeResults
from gdsstore.observe.counters import Counters
from gdsstore.transfer.flight import Flight
from gdsstore.volume.health import VolumeHealth

# What a drive says of itself; others are about a file, a full filesystem or our own memory.
DRIVE_ERRORS = (errno.EIO, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO, errno.ENODATA, errno.EILSEQ)

I64 = npt.NDArray[np.int64]
Moved = Callable[[Op, str, I64, I64], None]
"""Told the direction, the class (see Flight), and the bytes and requests that went to or came from each volume, by its index."""


class ChunkCounts:
    """Thread-safe."""

    def __init__(
        self,
        engine: str,
        counters: Counters,
        moved: Moved | None,
        health: Mapping[Op, Sequence[VolumeHealth]] | None,
        stall_s: float,
    ) -> None:
        """`health`: by volume, told how its drive answers; one that lets a chunk wait for `stall_s` counts as not answering."""
        self._engine, self._counters, self._moved = engine, counters, moved
        self._health, self._stall_s = health, stall_s

    def add(self, flight: Flight, results: RangeResults) -> None:
        """A chunk's requests have ended, or were waited for long enough."""
        flight.end_io()
        moved = results.moved
        self._counters.moved(flight.op, self._engine, int(moved.sum()), len(moved))
        volume = np.zeros(len(moved), np.int64)  # of each request
        volume[flight.plan.request] = flight.volume[flight.plan.page]
        nbytes = np.bincount(volume, moved).astype(np.int64)
        if self._moved is not None:
            operations = np.bincount(volume, moved > 0).astype(np.int64)
            self._moved(flight.op, flight.cls, nbytes, operations)
        seconds = time.monotonic() - flight.started
        late = results.errno == errno.ETIMEDOUT
        # A call with little time of its own says nothing of the drive yet: see `sweep`.
        stalled = late if seconds >= self._stall_s else np.zeros(len(late), np.bool_)
        flight.undecided = tuple(np.unique(volume[late & ~stalled]).tolist())
        failed = np.isin(results.errno, DRIVE_ERRORS)
        for index in np.unique(volume).tolist():
            mine = volume == index
            self._counters.chunk(flight.op, index, seconds)
            bad = bool((failed | stalled)[mine].any())
            # Other errors are not the drive's, and no proof that it is well.
            if self._health is not None and (bad or not results.errno[mine].any()):
                self._health[flight.op][index].record(
                    ok=not bad,
                    nbytes=int(nbytes[index]),
                    seconds=seconds,
                    timed_out=bool(stalled[mine].any()),
                )

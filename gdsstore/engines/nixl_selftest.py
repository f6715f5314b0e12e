"""Whether NIXL does on this machine what the nixl engine relies on: tried on a file in memory."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.nixl_ring import NixlRing, Progress
from gdsstore.errors import EngineError
from gdsstore.layout import ALIGNMENT
from gdsstore.waiting import Deadline

Bytes = npt.NDArray[np.uint8]

TIMEOUT_S = 5.0
POLL_S = 1e-4
BLOCKS = 4

_left_behind: list[object] = []  # what the kernel may still write into


def self_test(ring: NixlRing) -> None:
    """Write and read a file, and read past its end. Raises EngineError where bytes or results come out wrong.

    It goes to the ring itself: the engine would make up for a ring that fails, through posix, at twice the cost.
    """
    size = BLOCKS * ALIGNMENT
    memory = np.frombuffer(mmap.mmap(-1, 2 * size), np.uint8)
    written, read = memory[:size], memory[size:]
    written[:] = np.arange(size) % 251
    fd = os.memfd_create("gdsstore-self-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        # Twice its true size: what lies past the end is then for the kernel to find, and for NIXL to tell.
        ring.attach(fd, 2 * size)
        blocks = np.arange(BLOCKS, dtype=np.int64)
        try:
            moved = [
                _move(ring, Op.WRITE, fd, blocks[::-1], written),
                _move(ring, Op.READ, fd, blocks[::-1], read),
            ]
            if moved != [Progress.MOVED, Progress.MOVED] or not np.array_equal(written, read):
                raise EngineError(
                    "NIXL did not get a file's bytes back in its self-test: is io_uring allowed here?"
                )
            if _move(ring, Op.READ, fd, blocks + 1, read) is not Progress.FAILED:
                raise EngineError("NIXL did not report a read past the end of a file in its self-test")
        finally:
            ring.detach(fd)
    finally:
        os.close(fd)


def _move(ring: NixlRing, op: Op, fd: int, file_block: npt.NDArray[np.int64], memory: Bytes) -> Progress:
    address = np.uint64(memory.ctypes.data) + np.arange(BLOCKS, dtype=np.uint64) * np.uint64(ALIGNMENT)
    length = np.full(BLOCKS, ALIGNMENT, np.int64)
    request = ring.start(
        op, RangePlan(np.full(BLOCKS, fd, np.int32), file_block * ALIGNMENT, address, length)
    )
    deadline = Deadline(TIMEOUT_S)
    while ring.poll(request) is Progress.RUNNING and not deadline.passed:
        time.sleep(POLL_S)
    if request.progress in (Progress.RUNNING, Progress.LOST):
        _left_behind.extend([ring, request, memory])
        raise EngineError("NIXL did not end a transfer in its self-test")
    return request.progress

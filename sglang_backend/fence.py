"""What to do with a host pool's memory that the drive has not let go of when a call has to return.

SGLang gives the pages to others as soon as a call has returned, whatever it returned, and a read that ends late would write into
them. The kernel does not let us take a read back. But it writes into the physical pages that it was given, wherever they are
mapped: so we put fresh ones in their place, and the late bytes end in memory that nobody sees any more.

That is possible for anonymous memory of normal or transparent huge pages, which SGLang's host pools are without CUDA. Pages that
are pinned for the GPU, shared with another process by a file, or in hugetlb pages stay where they are; then the caller has to go
on waiting.
"""

from __future__ import annotations

import logging
import mmap

import numpy as np
import numpy.typing as npt

from gdsstore.memory.syscalls import map_over
from gdsstore.memory.views import PageMemory

log = logging.getLogger("gdsstore.sglang")

PAGE = mmap.PAGESIZE
ANONYMOUS_SHARED = "/dev/zero (deleted)"  # how the kernel names MAP_SHARED | MAP_ANONYMOUS


def replace_pages(memory: PageMemory) -> bool:
    """Put fresh zeroed pages where `memory` lies. False, with nothing changed, where its kind does not allow that."""
    ranges = _ranges(memory)
    try:
        if not ranges or not _are_anonymous(ranges):
            return False
    except OSError as error:  # no /proc, or no file descriptor left
        log.critical("it cannot be told which memory can be replaced: %s", error)
        return False
    try:
        for start, stop in ranges:
            map_over(start, stop - start)
    except OSError as error:
        log.critical("memory could not be replaced: %s", error)
        return False
    return True


def _ranges(memory: PageMemory) -> list[tuple[int, int]]:
    """The memory as few ranges, or none where they are not whole pages."""
    order = np.argsort(memory.address.ravel(), kind="stable")
    start = memory.address.ravel()[order].astype(np.int64)
    stop = start + memory.length.ravel()[order]
    if len(start) == 0 or (start % PAGE).any() or (stop % PAGE).any():
        return []
    apart = start[1:] != stop[:-1]
    first, last = start[np.append(True, apart)], stop[np.append(apart, True)]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def _are_anonymous(ranges: list[tuple[int, int]]) -> bool:
    """Whether all ranges are anonymous memory, without a hole: private, or shared by inheritance only (SGLang's default)."""
    low, high = _anonymous_memory()
    start, stop = np.array(ranges, np.int64).T
    at = np.searchsorted(low, start, "right") - 1
    return bool((at >= 0).all() and (stop <= high[at]).all())


def _anonymous_memory() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """This process's anonymous memory that can be read and written, as starts and ends, rising."""
    found = []
    with open("/proc/self/maps") as maps:  # once for all ranges: both can be many thousands
        for line in maps:
            span, permissions, _, _, inode, *name = line.split(maxsplit=5)
            private = permissions == "rw-p" and inode == "0"
            inherited = permissions == "rw-s" and bool(name) and name[0].strip() == ANONYMOUS_SHARED
            if private or inherited:
                found.append([int(end, 16) for end in span.split("-")])
    low, high = np.array(found, np.int64).reshape(-1, 2).T
    apart = low[1:] != high[:-1]
    return low[np.append(True, apart)], high[np.append(apart, True)]

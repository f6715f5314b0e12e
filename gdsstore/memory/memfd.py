"""Memory without a file name that other processes can map: made, touched, and sealed so that nobody else can change it.

After sealing, the file keeps its size for ever, so that no reader is killed by a page that went away (SIGBUS), and only the
mapping that was made before can write: whoever is handed the descriptor can read.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from gdsstore.errors import DeadlineError, StoreError
from gdsstore.memory import syscalls
from gdsstore.memory.hugepages import (
    GIB,
    HUGE_2M,
    SHARED,
    SYSFS,
    PageGrant,
    PageKind,
    Place,
    check_available,
    huge_page_bytes,
    populate,
    round_up,
    touch,
    verified,
)
from gdsstore.memory.syscalls import errno_name
from gdsstore.waiting import Deadline

NAME = "gdsstore"  # what /proc shows
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; from <linux/fcntl.h>
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_LAST_SEAL = fcntl.F_SEAL_SEAL  # no seal can be added by others
_COLLAPSE_CHUNK_BYTES = 256 << 20  # between two looks at the clock


@dataclass(frozen=True, slots=True)
class MemfdGrant:
    """`fd` is a descriptor of `pages.length` bytes, all mapped at `pages.address`. Both are the caller's."""

    fd: int
    pages: PageGrant


def map_memfd(
    size_bytes: int,
    *,
    huge_pages: bool,
    prefault: bool,
    deadline: Deadline,
    place: Place,
    sysfs: Path = SYSFS,
) -> MemfdGrant:
    """Make and map at least `size_bytes` of sealed memory on the best kind of page that is granted: as `hugepages.map_ladder`.

    Raises StoreError where the kernel makes no such memory or has too little, DeadlineError if touching it took too long.
    """
    notes: list[str] = []
    if huge_pages:
        for kind, page_bytes in ((PageKind.HUGETLB_1G, GIB), (PageKind.HUGETLB_2M, HUGE_2M)):
            grant = _hugetlb(kind, page_bytes, size_bytes, deadline, place, notes)
            if grant is not None:
                return grant
    else:
        notes.append("huge pages were not asked for")
    if prefault:
        check_available(size_bytes)
    length = round_up(size_bytes, mmap.PAGESIZE)
    fd = _create(length, 0)
    try:
        address = map_aligned(fd, length, huge_page_bytes(sysfs), writable=True)
    except OSError as error:
        os.close(fd)
        raise StoreError(
            "the kernel gave no memory; ask for less", size_bytes=size_bytes, errno=error.errno
        ) from error
    try:
        place(address, length, False)
        if prefault:
            touch(address, length, deadline)
        granted = _collapsed(address, length, huge_pages, prefault, deadline, notes, sysfs)
        _seal(fd, notes)
    except BaseException:
        syscalls.unmap(address, length)
        os.close(fd)
        raise
    kind, page_bytes = (
        (PageKind.TRANSPARENT, huge_page_bytes(sysfs)) if granted else (PageKind.BASE, mmap.PAGESIZE)
    )
    return MemfdGrant(fd, PageGrant(address, length, kind, page_bytes, tuple(notes)))


def map_aligned(fd: int, length: int, alignment: int, *, writable: bool) -> int:
    """Map a file at a multiple of `alignment`, where whole huge pages of it can be mapped as such. Raises OSError."""
    raw = syscalls.reserve(length + alignment)
    address = round_up(raw, alignment)
    try:
        syscalls.map_shared(fd, length, writable=writable, address=address)
    except OSError:
        syscalls.unmap(raw, length + alignment)
        raise
    if address > raw:
        syscalls.unmap(raw, address - raw)
    end = round_up(address + length, mmap.PAGESIZE)
    if raw + length + alignment > end:
        syscalls.unmap(end, raw + length + alignment - end)
    with contextlib.suppress(OSError):  # the pages of every process in one's core dump help nobody
        syscalls.advise(address, end - address, syscalls.MADV_DONTDUMP)
    return address


def _create(length: int, flags: int) -> int:
    try:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    except OSError as error:
        raise StoreError("the kernel makes no memory to share", errno=error.errno) from error
    try:
        os.ftruncate(fd, length)
    except OSError as error:
        os.close(fd)
        raise StoreError(
            "the kernel gave no memory; ask for less", size_bytes=length, errno=error.errno
        ) from error
    return fd


def _hugetlb(
    kind: PageKind, page_bytes: int, size_bytes: int, deadline: Deadline, place: Place, notes: list[str]
) -> MemfdGrant | None:
    """None, and one more note, where there are not enough such pages."""
    if size_bytes < page_bytes or (page_bytes == GIB and size_bytes % GIB):
        notes.append(f"{kind.value}: {size_bytes} bytes are not whole pages")
        return None
    length = round_up(size_bytes, page_bytes)
    try:
        fd = _create(length, os.MFD_HUGETLB | (page_bytes.bit_length() - 1) << os.MFD_HUGE_SHIFT)
    except StoreError as error:
        notes.append(f"{kind.value}: {error}")
        return None
    try:
        address = syscalls.map_shared(fd, length, writable=True)
    except OSError as error:
        os.close(fd)
        notes.append(f"{kind.value}: mmap gave {errno_name(error)} (too few pages reserved?)")
        return None
    try:
        # Always touched: a later touch that finds no page left is a SIGBUS, here and in every reader.
        place(address, length, True)
        populate(address, length, deadline)
        _seal(fd, notes)
    except BaseException as error:
        syscalls.unmap(address, length)
        os.close(fd)
        if not isinstance(error, OSError) or isinstance(error, DeadlineError):
            raise
        notes.append(f"{kind.value}: touching gave {errno_name(error)}")
        return None
    return MemfdGrant(fd, PageGrant(address, length, kind, page_bytes, tuple(notes)))


def _collapsed(
    address: int,
    length: int,
    huge_pages: bool,
    prefault: bool,
    deadline: Deadline,
    notes: list[str],
    sysfs: Path,
) -> bool:
    """Whether most of a range of touched memory lies on transparent huge pages now.

    Systems have them switched off for shared memory (`shmem_enabled` is `never`), where advice changes nothing; to collapse
    pages that are there is granted all the same.
    """
    name, huge_bytes = PageKind.TRANSPARENT.value, huge_page_bytes(sysfs)
    if not huge_pages or not prefault:
        if huge_pages:
            notes.append(f"{name}: not pre-faulted, so there is nothing to collapse yet")
        return False
    if length < huge_bytes:
        notes.append(f"{name}: {length} bytes are less than one page")
        return False
    enabled = sysfs / "kernel/mm/transparent_hugepage/enabled"
    if enabled.is_file() and "[never]" in enabled.read_text():
        notes.append(f"{name}: switched off (transparent_hugepage/enabled is never)")
        return False
    whole = length // huge_bytes * huge_bytes
    for at in range(0, whole, _COLLAPSE_CHUNK_BYTES):
        if deadline.passed:
            notes.append(f"{name}: no time was left for more than {at} of {whole} bytes")
            break
        try:
            syscalls.advise(address + at, min(_COLLAPSE_CHUNK_BYTES, whole - at), syscalls.MADV_COLLAPSE)
        except OSError as error:
            notes.append(f"{name}: collapsing pages gave {errno_name(error)}")
            break
    return verified(address, length, huge_bytes, notes, SHARED)


def _seal(fd: int, notes: list[str]) -> None:
    """Raises StoreError where not even the size can be sealed: no reader could map it safely."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | F_SEAL_FUTURE_WRITE | _LAST_SEAL)
        return
    except OSError as error:
        notes.append(f"readers are not kept from writing: sealing gave {errno_name(error)}")
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | _LAST_SEAL)
    except OSError as error:
        raise StoreError(
            "the kernel does not seal shared memory; run without share_host_cache", errno=error.errno
        ) from error

"""The ladder of page kinds: hugetlb 1 GiB, hugetlb 2 MiB, transparent huge pages, base pages.

The kind of host memory matters more than the engine: with base pages, direct I/O pins and maps 512 times as many pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gdsstore.errors import DeadlineError, StoreError
from gdsstore.memory import syscalls
from gdsstore.memory.available import available_bytes
from gdsstore.memory.syscalls import errno_name
from gdsstore.waiting import Deadline

SYSFS = Path("/sys")
GIB = 1 << 30
HUGE_2M = 2 << 20
ANONYMOUS, SHARED = "AnonHugePages:", "ShmemPmdMapped:"  # huge pages in smaps

_POPULATE_CHUNK_BYTES = 256 << 20  # how much is zeroed between two looks at the clock: well under a second


class PageKind(Enum):
    HUGETLB_1G = "hugetlb 1 GiB"
    HUGETLB_2M = "hugetlb 2 MiB"
    TRANSPARENT = "transparent huge pages"
    BASE = "base pages"


@dataclass(frozen=True, slots=True)
class PageGrant:
    """A mapping of `length` bytes at `address`, and why no better kind of page was granted."""

    address: int
    length: int  # bytes, at least what was asked for
    kind: PageKind
    page_bytes: int
    notes: tuple[str, ...]


# Called with (address, length, strict) between mapping and pre-fault, the only moment at which NUMA placement costs
# nothing. Must not raise.
Place = Callable[[int, int, bool], None]


def map_ladder(
    size_bytes: int,
    *,
    huge_pages: bool,
    prefault: bool,
    deadline: Deadline,
    place: Place,
    sysfs: Path = SYSFS,
) -> PageGrant:
    """Map at least `size_bytes` on the best kind of page that is granted.

    Raises StoreError where not even base pages are granted, or fewer bytes are available than would be touched;
    DeadlineError if the pre-fault took too long. Nothing stays mapped then.
    """
    notes: list[str] = []
    if huge_pages:
        for kind, page_bytes in ((PageKind.HUGETLB_1G, GIB), (PageKind.HUGETLB_2M, HUGE_2M)):
            address, length = _hugetlb(kind, page_bytes, size_bytes, deadline, place, notes)
            if length:
                return PageGrant(address, length, kind, page_bytes, tuple(notes))
    else:
        notes.append("huge pages were not asked for")
    return _ordinary(size_bytes, huge_pages, prefault, deadline, place, notes, sysfs)


def populate(address: int, length: int, deadline: Deadline) -> None:
    """Touch a range, so that no I/O waits for a fault. Raises OSError, or DeadlineError."""
    at = 0
    while at < length:
        if deadline.passed:
            raise DeadlineError("pre-faulting took too long; ask for less memory", touched_bytes=at)
        chunk = min(_POPULATE_CHUNK_BYTES, length - at)
        try:
            syscalls.advise(address + at, chunk, syscalls.MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN):
                continue
            raise
        at += chunk


def check_available(size_bytes: int) -> None:
    """Raises StoreError where fewer bytes are there: the kernel would not refuse, but kill a process half-way through touching."""
    room = available_bytes()
    if room is not None and size_bytes > room:
        raise StoreError(
            "not enough memory is available; ask for less", size_bytes=size_bytes, available_bytes=room
        )


def _hugetlb(
    kind: PageKind, page_bytes: int, size_bytes: int, deadline: Deadline, place: Place, notes: list[str]
) -> tuple[int, int]:
    """Address and length, or length 0 and one more note."""
    # 2 MiB pages are rounded up to; up to 1 GiB lost to rounding would cost more than 1 GiB pages gain.
    if size_bytes < page_bytes or (page_bytes == GIB and size_bytes % GIB):
        notes.append(f"{kind.value}: {size_bytes} bytes are not whole pages")
        return 0, 0
    length = round_up(size_bytes, page_bytes)
    flags = syscalls.MAP_HUGETLB | (page_bytes.bit_length() - 1) << syscalls.MAP_HUGE_SHIFT
    try:
        address = syscalls.map_anonymous(length, flags)
    except OSError as error:
        notes.append(f"{kind.value}: mmap gave {errno_name(error)} (too few pages reserved?)")
        return 0, 0
    # Always touched, prefault or not, and only by MADV_POPULATE_WRITE: where the node or the cgroup has none left, a
    # later touch is a SIGBUS that takes the process down, and this is an error to read.
    try:
        place(address, length, True)
        populate(address, length, deadline)
    except DeadlineError:  # an OSError too, being a TimeoutError
        syscalls.unmap(address, length)
        raise
    except OSError as error:
        syscalls.unmap(address, length)
        old = error.errno == errno.EINVAL
        why = "needs Linux 5.14" if old else "none left on this node or in this cgroup?"
        notes.append(f"{kind.value}: touching gave {errno_name(error)} ({why})")
        return 0, 0
    except BaseException:
        syscalls.unmap(address, length)
        raise
    return address, length


def _ordinary(
    size_bytes: int,
    huge_pages: bool,
    prefault: bool,
    deadline: Deadline,
    place: Place,
    notes: list[str],
    sysfs: Path,
) -> PageGrant:
    """Transparent huge pages where the kernel gives them, else base pages."""
    if prefault:
        check_available(size_bytes)
    huge_bytes = huge_page_bytes(sysfs)
    length = round_up(size_bytes, mmap.PAGESIZE)
    try:
        address = _map_aligned(length, huge_bytes)
    except OSError as error:
        raise StoreError(
            "the kernel gave no memory; ask for less", size_bytes=size_bytes, errno=error.errno
        ) from error
    try:
        advised = _advise(address, length, huge_pages, huge_bytes, notes, sysfs)
        place(address, length, False)
        if prefault:
            touch(address, length, deadline)
            granted = advised and verified(address, length, huge_bytes, notes)
        else:
            granted = advised
            notes.append("not pre-faulted: which pages are granted shows at the first touch")
    except BaseException:
        syscalls.unmap(address, length)
        raise
    if granted:
        return PageGrant(address, length, PageKind.TRANSPARENT, huge_bytes, tuple(notes))
    return PageGrant(address, length, PageKind.BASE, mmap.PAGESIZE, tuple(notes))


def _advise(
    address: int, length: int, huge_pages: bool, huge_bytes: int, notes: list[str], sysfs: Path
) -> bool:
    """Whether transparent huge pages may be expected."""
    advice = syscalls.MADV_HUGEPAGE if huge_pages else syscalls.MADV_NOHUGEPAGE
    name = PageKind.TRANSPARENT.value
    if huge_pages and length < huge_bytes:
        notes.append(f"{name}: {length} bytes are less than one page")
        return False
    if huge_pages and "[never]" in _read(sysfs / "kernel/mm/transparent_hugepage/enabled"):
        notes.append(f"{name}: switched off (transparent_hugepage/enabled is never)")
        return False
    try:
        syscalls.advise(address, length, advice)
    except OSError as error:
        if huge_pages:
            notes.append(f"{name}: madvise gave {errno_name(error)}")
        return False
    return huge_pages


def touch(address: int, length: int, deadline: Deadline) -> None:
    """`populate` fresh memory, on old kernels too. Raises StoreError where there is not enough, or DeadlineError."""
    try:
        populate(address, length, deadline)
    except DeadlineError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # before Linux 5.14
            for at in range(0, length, _POPULATE_CHUNK_BYTES):
                if deadline.passed:
                    raise DeadlineError(
                        "pre-faulting took too long; ask for less memory", touched_bytes=at
                    ) from None
                # Fresh memory is zero: writing zeros changes nothing but that the pages are there.
                ctypes.memset(address + at, 0, min(_POPULATE_CHUNK_BYTES, length - at))
            return
        raise StoreError(
            "the kernel gave no memory; ask for less", size_bytes=length, errno=error.errno
        ) from error


def verified(
    address: int, length: int, huge_bytes: int, notes: list[str], counted_as: str = ANONYMOUS
) -> bool:
    """Whether the touched range lies on huge pages: advice is no promise (fragmentation, limits)."""
    whole = length // huge_bytes * huge_bytes
    found = transparent_bytes(address, length, counted_as=counted_as)
    if found is None:
        notes.append(f"{PageKind.TRANSPARENT.value}: advised, but /proc/self/smaps cannot be read to check")
        return True
    if found < whole:
        notes.append(
            f"{PageKind.TRANSPARENT.value}: only {found} of {whole} bytes were granted (fragmented memory?)"
        )
    # Called by the name of what most of it is.
    return found * 2 >= whole


def transparent_bytes(
    address: int, length: int, smaps: Path = Path("/proc/self/smaps"), counted_as: str = ANONYMOUS
) -> int | None:
    """Bytes of a range on transparent huge pages, which the kernel counts as ANONYMOUS or SHARED ones. It counts by mapping, and
    neighbours of a kind merge into one mapping, so the count may include neighbours; it is never above `length`. None where not
    readable.
    """
    total, inside = 0, False
    try:
        with smaps.open() as lines:
            for line in lines:
                head = line.split(maxsplit=1)[0]
                if "-" in head:
                    first, last = (int(part, 16) for part in head.split("-"))
                    inside = first < address + length and address < last
                elif inside and head == counted_as:
                    total += int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return min(total, length)


def _map_aligned(length: int, alignment: int) -> int:
    """Ordinary memory at a multiple of `alignment`, which mmap does not promise: map more, and give back the ends."""
    raw = syscalls.map_anonymous(length + alignment)
    address = round_up(raw, alignment)
    if address > raw:
        syscalls.unmap(raw, address - raw)
    tail = raw + length + alignment - (address + length)
    if tail:
        syscalls.unmap(address + length, tail)
    return address


def huge_page_bytes(sysfs: Path = SYSFS) -> int:
    """The size of a transparent huge page: 2 MiB, but 512 MiB on ARM with 64 KiB base pages."""
    text = _read(sysfs / "kernel/mm/transparent_hugepage/hpage_pmd_size")
    return int(text) if text.isdigit() else HUGE_2M


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple

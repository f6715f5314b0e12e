"""The ladder of page kinds: the best that is granted, and of every better one why it was not."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from gdsstore.errors import DeadlineError, StoreError
from gdsstore.memory import hugepages, syscalls
from gdsstore.memory.available import available_bytes
from gdsstore.memory.hugepages import GIB, HUGE_2M, PageGrant, PageKind, map_ladder, transparent_bytes
from gdsstore.waiting import Deadline

SIZE = 4 << 20


def _map(
    size: int = SIZE, *, huge_pages: bool = True, prefault: bool = True, sysfs: Path = Path("/sys")
) -> PageGrant:
    return map_ladder(
        size,
        huge_pages=huge_pages,
        prefault=prefault,
        deadline=Deadline(60),
        place=lambda address, length, strict: None,
        sysfs=sysfs,
    )


class Kernel:
    """Refuses what a test says and passes the rest on; hugetlb becomes ordinary memory. Counts what stays mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hugetlb: dict[int, int] = {
            GIB: errno.ENOMEM,
            HUGE_2M: errno.ENOMEM,
        }  # page bytes -> errno of mmap, or 0
        self.advice: dict[int, int] = {}  # advice -> errno
        self.touch_of_hugetlb = 0  # errno
        self._reserved: list[int] = []  # addresses
        self.mapped_bytes = 0
        self._map, self._unmap, self._advise = syscalls.map_anonymous, syscalls.unmap, syscalls.advise
        monkeypatch.setattr(syscalls, "map_anonymous", self.map_anonymous)
        monkeypatch.setattr(syscalls, "unmap", self.unmap)
        monkeypatch.setattr(syscalls, "advise", self.advise_range)

    def map_anonymous(self, length: int, flags: int = 0) -> int:
        if flags & syscalls.MAP_HUGETLB:
            refusal = self.hugetlb[1 << (flags >> syscalls.MAP_HUGE_SHIFT)]
            if refusal:
                raise OSError(refusal, os.strerror(refusal))
        self.mapped_bytes += length
        address = self._map(length)
        if flags & syscalls.MAP_HUGETLB:
            self._reserved.append(address)
        return address

    def unmap(self, address: int, length: int) -> None:
        self.mapped_bytes -= length
        self._unmap(address, length)

    def advise_range(self, address: int, length: int, advice: int) -> None:
        refusal = self.advice.get(advice, 0)
        if advice == syscalls.MADV_POPULATE_WRITE and address in self._reserved:
            refusal = self.touch_of_hugetlb
            self._reserved.remove(address)
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        self._advise(address, length, advice)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def _off(tmp_path: Path) -> Path:
    """A sysfs in which transparent huge pages are switched off."""
    path = tmp_path / "kernel/mm/transparent_hugepage"
    path.mkdir(parents=True)
    (path / "enabled").write_text("always madvise [never]\n")
    (path / "hpage_pmd_size").write_text("2097152\n")
    return tmp_path


def _done(kernel: Kernel, grant: PageGrant) -> None:
    assert kernel.mapped_bytes == grant.length, "the ladder left something mapped beside what it granted"
    syscalls.unmap(grant.address, grant.length)


def test_granted_memory_is_aligned_zero_and_writable(kernel: Kernel) -> None:
    grant = _map(SIZE + 1)
    assert grant.address % HUGE_2M == 0
    assert grant.length >= SIZE + 1
    assert ctypes.string_at(grant.address, grant.length).count(0) == grant.length
    ctypes.memset(grant.address, 7, grant.length)
    _done(kernel, grant)


def test_reserved_huge_pages_come_first(kernel: Kernel) -> None:
    kernel.hugetlb[HUGE_2M] = 0
    grant = _map(SIZE + 1)
    assert (grant.kind, grant.page_bytes, grant.length) == (PageKind.HUGETLB_2M, HUGE_2M, SIZE + HUGE_2M)
    assert len(grant.notes) == 1
    assert "1 GiB" in grant.notes[0]
    _done(kernel, grant)


def test_the_largest_reserved_page_comes_first_of_all(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.hugetlb = {GIB: 0, HUGE_2M: 0}
    monkeypatch.setattr(
        syscalls, "advise", lambda address, length, advice: None
    )  # a GiB need not be touched here
    grant = _map(GIB)
    assert (grant.kind, grant.page_bytes, grant.notes) == (PageKind.HUGETLB_1G, GIB, ())
    _done(kernel, grant)


def test_reserved_pages_that_run_out_at_the_touch_are_no_crash(kernel: Kernel) -> None:
    kernel.hugetlb[HUGE_2M] = 0
    kernel.touch_of_hugetlb = errno.EFAULT  # what would have been a SIGBUS
    grant = _map()
    assert grant.kind in (PageKind.TRANSPARENT, PageKind.BASE)
    assert any("hugetlb 2 MiB: touching gave EFAULT" in note for note in grant.notes)
    _done(kernel, grant)


def test_reserved_pages_are_touched_even_if_pre_faulting_is_off(kernel: Kernel) -> None:
    kernel.hugetlb[HUGE_2M] = 0
    kernel.touch_of_hugetlb = errno.EFAULT
    grant = _map(prefault=False)
    assert grant.kind is not PageKind.HUGETLB_2M
    _done(kernel, grant)


def test_huge_pages_switched_off_are_reported(kernel: Kernel, tmp_path: Path) -> None:
    grant = _map(sysfs=_off(tmp_path))
    assert (grant.kind, grant.page_bytes) == (PageKind.BASE, mmap.PAGESIZE)
    assert [note.split(":")[0] for note in grant.notes] == [
        "hugetlb 1 GiB",
        "hugetlb 2 MiB",
        "transparent huge pages",
    ]
    assert "ENOMEM" in grant.notes[1]
    assert "never" in grant.notes[2]
    _done(kernel, grant)


def test_a_refused_advice_is_reported_by_errno(kernel: Kernel) -> None:
    kernel.advice[syscalls.MADV_HUGEPAGE] = errno.EINVAL
    grant = _map()
    assert grant.kind is PageKind.BASE
    assert grant.notes[-1] == "transparent huge pages: madvise gave EINVAL"
    _done(kernel, grant)


def test_advice_that_the_kernel_did_not_follow_is_not_claimed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugepages, "transparent_bytes", lambda address, length, **_: 0)
    grant = _map()
    assert grant.kind is PageKind.BASE
    assert "only 0 of 4194304 bytes" in grant.notes[-1]
    _done(kernel, grant)


def test_without_a_wish_for_huge_pages_there_are_none(kernel: Kernel) -> None:
    kernel.hugetlb = {GIB: 0, HUGE_2M: 0}
    grant = _map(huge_pages=False)
    assert grant.kind is PageKind.BASE
    assert transparent_bytes(grant.address, grant.length) == 0
    _done(kernel, grant)


def test_a_kernel_before_5_14_is_touched_by_hand(kernel: Kernel) -> None:
    kernel.advice[syscalls.MADV_POPULATE_WRITE] = errno.EINVAL
    grant = _map(huge_pages=False)
    resident = (ctypes.c_ubyte * (grant.length // mmap.PAGESIZE))()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(grant.address), ctypes.c_size_t(grant.length), resident)
        == 0
    )
    assert all(flags & 1 for flags in resident)
    _done(kernel, grant)


@pytest.mark.parametrize("reserved", [errno.ENOMEM, 0], ids=["ordinary pages", "reserved huge pages"])
def test_pre_faulting_stops_at_its_deadline_and_unmaps(kernel: Kernel, reserved: int) -> None:
    kernel.hugetlb[HUGE_2M] = reserved
    places: list[int] = []
    with pytest.raises(DeadlineError):
        map_ladder(
            SIZE,
            huge_pages=True,
            prefault=True,
            deadline=Deadline(0),
            place=lambda address, length, strict: places.append(address),
        )
    assert len(places) == 1, "another step was tried after the deadline"
    assert kernel.mapped_bytes == 0


def test_memory_that_is_not_there_is_refused_before_it_is_touched(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugepages, "available_bytes", lambda: SIZE - 1)
    with pytest.raises(StoreError, match="not enough memory"):
        _map()
    assert kernel.mapped_bytes == 0


def test_more_than_the_address_space_is_a_typed_error() -> None:
    with pytest.raises(StoreError, match="gave no memory"):
        _map(1 << 50, prefault=False)


def test_huge_bytes_are_counted_over_all_mappings_of_a_range(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0\nRss: 4096 kB\nAnonHugePages:      2048 kB\nVmFlags: rd wr\n"
        "7f0000400000-7f0000800000 rw-p 00000000 00:00 0 \nAnonHugePages:      4096 kB\n"
        "7f0000a00000-7f0000c00000 rw-p 00000000 00:00 0 \nAnonHugePages:      2048 kB\n"
    )
    assert transparent_bytes(0x7F0000000000, 8 << 20, smaps) == 6 << 20
    assert transparent_bytes(0x7F0000800000, 2 << 20, smaps) == 0
    assert transparent_bytes(0x7F0000000000, 8 << 20, tmp_path / "absent") is None


def _machine(root: Path, cgroup: str, limits: dict[str, tuple[str, int, int]]) -> Path:
    """A root with 10 GiB available, and cgroups: path -> limit, used and cached bytes."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 20971520 kB\nMemAvailable:   10485760 kB\n")
    (root / "proc/self/cgroup").write_text(f"0::{cgroup}\n")
    for path, (limit, used, cached) in limits.items():
        group = root / "sys/fs/cgroup" / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 0\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("/", {}, 10 << 30),
        ("/a/b", {"a/b": ("max", 5, 0)}, 10 << 30),
        ("/a/b", {"a/b": (str(4 << 30), 3 << 30, 1 << 30)}, 2 << 30),
        ("/a/b", {"a/b": ("max", 5, 0), "a": (str(1 << 30), 0, 0)}, 1 << 30),
        ("/host/path", {"": (str(3 << 30), 1 << 30, 0)}, 2 << 30),
        ("/", {"": (str(1 << 30), 2 << 30, 0)}, 0),
    ],
    ids=["no limit", "max", "cache gives way", "the group above", "a container's own root", "over the limit"],
)
def test_available_memory_is_what_the_tightest_limit_leaves(
    tmp_path: Path, cgroup: str, limits: dict[str, tuple[str, int, int]], expected: int
) -> None:
    assert available_bytes(_machine(tmp_path, cgroup, limits)) == expected


def test_unknown_available_memory_is_none(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None

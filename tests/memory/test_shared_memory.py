"""Memory that other processes map: they read the same bytes, and can neither write nor lose them."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.errors import ArgumentError, StoreError
from gdsstore.memory import memfd, syscalls
from gdsstore.memory.shared import SharedArena, SharedView
from tests.memory.test_pinning import Driver

SIZE = 4 << 20
READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY


def arena(size_bytes: int = SIZE, **options: Any) -> SharedArena:
    return SharedArena(size_bytes, **{"huge_pages": "off", "pin": "off", **options})


def test_what_the_owner_writes_is_read_through_a_view() -> None:
    with arena() as shared:
        view = SharedView(shared.shared.fd, shared.shared.size_bytes)
        shared.array[:] = np.arange(SIZE, dtype=np.uint64).view(np.uint8)[:SIZE]
        assert (view.array == shared.array).all()
        assert not view.array.flags.writeable


@pytest.mark.parametrize("huge_pages", ["auto", "off"])
def test_nobody_but_the_owner_can_write_or_resize(huge_pages: str) -> None:
    with arena(huge_pages=huge_pages) as shared:
        fd = shared.shared.fd
        with pytest.raises(PermissionError):
            mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for size in (0, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        shared.array[7] = 1  # the owner still can


def test_core_dumps_leave_it_out() -> None:
    with arena() as shared:
        view = SharedView(shared.shared.fd, shared.shared.size_bytes)
        for address in (shared.address, view.address):
            _, _, rest = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")
            flags = next(line for line in rest.splitlines() if line.startswith("VmFlags:"))
            assert "dd" in flags.split()


def test_a_view_outlives_its_owner() -> None:
    shared = arena()
    shared.array[:] = 77
    view = SharedView(shared.shared.fd, SIZE)
    assert shared.close(0)
    assert (view.array == 77).all()


def test_the_descriptor_goes_with_the_arena() -> None:
    before = set(os.listdir("/proc/self/fd"))
    shared = arena()
    assert os.readlink(f"/proc/self/fd/{shared.shared.fd}").startswith("/memfd:gdsstore")
    assert not os.get_inheritable(shared.shared.fd)
    shared.close(0)
    del shared
    arena()  # nobody closes it
    assert set(os.listdir("/proc/self/fd")) <= before | {"3"}  # listing opens one


def test_huge_pages_are_collapsed_where_shared_memory_gets_none_by_itself() -> None:
    with arena(huge_pages="auto") as shared:
        whole = shared.grant.page_bytes > mmap.PAGESIZE
        assert whole or shared.grant.notes, "what was not granted is reported"
        assert shared.address % (2 << 20) == 0


@pytest.mark.parametrize("error", [22, 12])
def test_pages_that_are_not_collapsed_are_reported(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    advise = syscalls.advise

    def refuse(address: int, length: int, advice: int) -> None:
        if advice == syscalls.MADV_COLLAPSE:
            raise OSError(error, "refused")
        advise(address, length, advice)

    monkeypatch.setattr(syscalls, "advise", refuse)
    with arena(huge_pages="auto") as shared:
        if "hugetlb" not in shared.grant.pages.value:
            assert shared.grant.page_bytes == mmap.PAGESIZE
            assert any("collapsing pages gave E" in note for note in shared.grant.notes)


def test_where_the_kernel_cannot_keep_readers_from_writing_that_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memfd, "F_SEAL_FUTURE_WRITE", 1 << 20)
    with arena() as shared:
        assert any("not kept from writing" in note for note in shared.grant.notes)
        assert fcntl.fcntl(shared.shared.fd, fcntl.F_GET_SEALS) & memfd.SIZE_SEALS == memfd.SIZE_SEALS


def test_memory_that_could_go_away_is_not_mapped() -> None:
    fd = os.memfd_create("open", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        with pytest.raises(StoreError, match="not sealed"):
            SharedView(fd, SIZE)
    finally:
        os.close(fd)


def test_memory_of_another_size_or_kind_is_not_mapped() -> None:
    with arena() as shared:
        with pytest.raises(StoreError, match="smaller"):
            SharedView(shared.shared.fd, SIZE + 1)
        with pytest.raises(ArgumentError):
            SharedView(shared.shared.fd, 0)
    with open(__file__, "rb") as file, pytest.raises(StoreError, match="no memory that a process shares"):
        SharedView(file.fileno(), 10)


def test_a_view_is_pinned_as_what_it_is_and_unpinned_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, flags, order = Driver(), [], []
    register, unregister, unmap = driver.cuMemHostRegister_v2, driver.cuMemHostUnregister, syscalls.unmap
    monkeypatch.setattr(
        driver, "cuMemHostRegister_v2", lambda a, n, f: (flags.append(f.value), register(a, n, f))[1]
    )
    monkeypatch.setattr(driver, "cuMemHostUnregister", lambda a: (order.append("unpin"), unregister(a))[1])
    with arena() as shared:
        view = SharedView(shared.shared.fd, SIZE, cuda_driver=driver)
        assert view.pinned
        assert flags[0] & READ_ONLY
        monkeypatch.setattr(syscalls, "unmap", lambda a, n: (order.append("unmap"), unmap(a, n))[1])
        del view
        assert order == ["unpin", "unmap"]
        assert driver.registered == {}


def test_what_is_not_pinned_says_why() -> None:
    with arena() as shared:
        view = SharedView(shared.shared.fd, SIZE, cuda_driver=Driver(active=()))
        assert not view.pinned
        assert "no CUDA context" in view.notes[0]

"""Memory that a drive may still write into gets fresh pages where that is possible, and is left alone where it is not."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.mem_cache.storage.mmap import alloc_mmap, alloc_shm

from gdsstore.memory.views import PageMemory
from sglang_backend import fence
from sglang_backend.fence import replace_pages
from tests.sglang_backend.drives import pinned

PAGE = mmap.PAGESIZE
COUNT = 16
MINE = [3, 4, 9]
U8 = npt.NDArray[np.uint8]


def private() -> U8:
    return np.frombuffer(mmap.mmap(-1, COUNT * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def shared() -> U8:
    return np.frombuffer(mmap.mmap(-1, COUNT * PAGE), np.uint8)


def sglangs() -> U8:
    array = alloc_mmap((COUNT * PAGE,), torch.uint8).numpy()
    assert isinstance(array, np.ndarray)
    return array


ALLOWED = [private, shared, sglangs]


def marked(memory: U8) -> U8:
    """Every page full of its own number, from 1."""
    pages = memory.reshape(-1, PAGE)
    pages[:] = np.arange(1, len(pages) + 1, dtype=np.uint8)[:, None]
    return pages


def at(pages: U8, numbers: list[int], *, offset: int = 0, length: int = PAGE) -> PageMemory:
    address = np.array([[pages.ctypes.data + number * PAGE + offset] for number in numbers], np.uint64)
    return PageMemory(address, np.full(address.shape, length, np.int64), pages)


def numbers(pages: U8) -> list[int]:
    assert (pages == pages[:, :1]).all()
    return [int(number) for number in pages[:, 0]]


@pytest.mark.parametrize("make", ALLOWED)
@pytest.mark.parametrize("order", [MINE, MINE[::-1]])
def test_fresh_pages_take_the_place_of_the_old_ones_and_neighbours_stay(
    make: Callable[[], U8], order: list[int]
) -> None:
    pages = marked(make())
    assert replace_pages(at(pages, order))
    assert numbers(pages) == [0 if page in MINE else page + 1 for page in range(COUNT)]
    pages[:] = 7  # and they can be used
    assert numbers(pages) == [7] * COUNT
    assert replace_pages(at(pages, MINE))  # again
    assert numbers(pages) == [0 if page in MINE else 7 for page in range(COUNT)]


@pytest.mark.parametrize("make", [shared, sglangs])
def test_what_is_written_to_the_old_pages_later_is_not_seen(make: Callable[[], U8]) -> None:
    pages = marked(make())
    drives = [pinned(pages.ctypes.data + page * PAGE, PAGE) for page in (*MINE, 0)]
    ctypes.memset(drives[0], 0x55, PAGE)
    assert numbers(pages)[MINE[0]] == 0x55  # it is the same memory
    assert replace_pages(at(pages, MINE))
    for address in drives:
        ctypes.memset(address, 0x66, PAGE)
    expected = [0 if page in MINE else page + 1 for page in range(COUNT)]
    assert numbers(pages) == [0x66, *expected[1:]]  # the first page was not replaced


def test_pages_in_several_pieces_are_replaced_whole() -> None:
    pages = marked(private())
    address = pages.ctypes.data + PAGE * np.array([[1, 8], [2, 5]], np.uint64)
    length = np.array([[PAGE, 2 * PAGE], [PAGE, PAGE]], np.int64)
    assert replace_pages(PageMemory(address.astype(np.uint64), length, pages))
    assert [page for page, number in enumerate(numbers(pages)) if number == 0] == [1, 2, 5, 8, 9]


def test_thousands_of_pieces_are_replaced() -> None:
    count = 6000
    memory = np.frombuffer(mmap.mmap(-1, count * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory.reshape(count, PAGE)[:, 0] = 1
    assert replace_pages(at(memory.reshape(count, PAGE), list(range(0, count, 2))))
    assert memory.reshape(count, PAGE)[:, 0].tolist() == [0, 1] * (count // 2)


def test_no_memory_is_nothing_to_replace() -> None:
    assert not replace_pages(PageMemory(np.zeros((0, 1), np.uint64), np.zeros((0, 1), np.int64), None))


def memfd(folder: Path) -> mmap.mmap:
    """What other processes can map too."""
    fd = os.memfd_create("pool")
    os.ftruncate(fd, COUNT * PAGE)
    return mmap.mmap(fd, COUNT * PAGE)


def file(folder: Path, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    path = folder / "pool"
    path.write_bytes(bytes(COUNT * PAGE))
    with path.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), COUNT * PAGE, flags=flags)


def private_file(folder: Path) -> mmap.mmap:
    return file(folder, mmap.MAP_PRIVATE)


@pytest.mark.parametrize("make", [memfd, file, private_file])
def test_memory_of_files_and_of_other_processes_is_refused(
    make: Callable[[Path], mmap.mmap], tmp_path: Path
) -> None:
    pages = marked(np.frombuffer(make(tmp_path), np.uint8))
    assert not replace_pages(at(pages, MINE))
    assert numbers(pages) == list(range(1, COUNT + 1))


def test_sglangs_pools_that_other_processes_map_are_refused() -> None:
    tensor, fd, _ = alloc_shm((COUNT * PAGE,), torch.uint8)
    pages = marked(tensor.numpy())
    assert not replace_pages(at(pages, MINE))
    assert numbers(pages) == list(range(1, COUNT + 1))
    os.close(fd)


@pytest.mark.parametrize(("offset", "length"), [(512, PAGE), (0, PAGE // 2), (512, PAGE - 512)])
def test_parts_of_pages_are_refused(offset: int, length: int) -> None:
    pages = marked(private())
    assert not replace_pages(at(pages, MINE, offset=offset, length=length))
    assert numbers(pages) == list(range(1, COUNT + 1))


def test_if_one_of_the_pages_cannot_be_replaced_none_is(tmp_path: Path) -> None:
    mine, others = marked(private()), marked(np.frombuffer(memfd(tmp_path), np.uint8))
    both = [at(mine, MINE), at(others, MINE)]
    for parts in (both, both[::-1]):
        memory = PageMemory(
            np.concatenate([part.address for part in parts]),
            np.concatenate([part.length for part in parts]),
            None,
        )
        assert not replace_pages(memory)
        assert numbers(mine) == numbers(others) == list(range(1, COUNT + 1))


def test_memory_that_can_only_be_read_and_holes_are_refused() -> None:
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pages = marked(private())
    for protection in (mmap.PROT_READ, 0):
        assert libc.mprotect(pages.ctypes.data + 4 * PAGE, PAGE, protection) == 0
        assert not replace_pages(at(pages, MINE))
        assert not replace_pages(at(pages, [3], length=3 * PAGE))
    assert libc.mprotect(pages.ctypes.data + 4 * PAGE, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert numbers(pages) == list(range(1, COUNT + 1))
    assert not replace_pages(PageMemory(np.array([[PAGE]], np.uint64), np.array([[PAGE]], np.int64), None))


def test_where_the_kernel_does_not_tell_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file descriptor is left, say."""

    def refuse(*args: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(fence, "open", refuse, raising=False)
    pages = marked(private())
    assert not replace_pages(at(pages, MINE))
    assert numbers(pages) == list(range(1, COUNT + 1))

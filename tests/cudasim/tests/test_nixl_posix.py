"""NIXL 1.5.1, POSIX plugin on host memory: behaviour worth pinning of its io_uring and Linux AIO queues."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from tests.cudasim.tests.nixl_rig import Rig

MiB = 1 << 20
BLOCKS = 8
UNTOUCHED = b"\x11" * MiB
BEYOND = 1 << 30  # registered length of the file: NIXL must not refuse what the kernel is to refuse

pytestmark = pytest.mark.own_process(NIXL_LOG_LEVEL="FATAL")

Memory = npt.NDArray[np.uint8]
MakeRig = Callable[[int], Rig]


@pytest.fixture
def memory() -> Memory:
    array = np.frombuffer(mmap.mmap(-1, BLOCKS * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    array[:] = 0x11
    return array


@pytest.fixture(params=["use_uring", "use_aio"])
def make_rig(request: pytest.FixtureRequest, nixl: ModuleType, memory: Memory) -> Iterator[MakeRig]:
    """A rig with the given fd."""
    with ExitStack() as stack:

        def make(fd: int) -> Rig:
            where = (memory.ctypes.data, memory.nbytes, "DRAM")
            return stack.enter_context(Rig(nixl, "POSIX", where, (fd, BEYOND), {request.param: "true"}))

        yield make


@pytest.fixture
def fd(data_file: Path) -> Iterator[int]:
    fd = os.open(data_file, os.O_RDWR | os.O_DIRECT)
    yield fd
    os.close(fd)


def blocks(memory: Memory) -> list[bytes]:
    return [memory[i * MiB : (i + 1) * MiB].tobytes() for i in range(BLOCKS)]


def test_a_read_puts_each_block_in_its_place(make_rig: MakeRig, fd: int, memory: Memory, data: bytes) -> None:
    offsets = [(BLOCKS - 1 - i) * MiB for i in range(BLOCKS)]
    assert make_rig(fd).run("READ", offsets, MiB) == "DONE"
    assert blocks(memory) == [data[o : o + MiB] for o in offsets]


def test_a_write_puts_each_block_in_its_place(
    make_rig: MakeRig, fd: int, memory: Memory, data: bytes, data_file: Path
) -> None:
    offsets = [(BLOCKS - 1 - i) * MiB for i in range(BLOCKS)]
    memory[:] = np.frombuffer(data, np.uint8)
    assert make_rig(fd).run("WRITE", offsets, MiB) == "DONE"
    written = data_file.read_bytes()
    assert [written[o : o + MiB] for o in offsets] == blocks(memory)


@pytest.mark.parametrize(
    "third",
    [BLOCKS * MiB - MiB // 2, BLOCKS * MiB, BLOCKS * MiB + 100 * MiB, 2 * MiB + 513],
    ids=["over the end", "at the end", "behind the end", "misaligned for O_DIRECT"],
)
def test_one_bad_range_fails_the_transfer_but_not_the_other_ranges(
    make_rig: MakeRig, nixl: ModuleType, fd: int, memory: Memory, data: bytes, third: int
) -> None:
    rig = make_rig(fd)
    with pytest.raises(nixl._bindings.nixlBackendError):
        rig.run("READ", [0, MiB, third, 3 * MiB], MiB)
    assert blocks(memory)[:2] == [data[:MiB], data[MiB : 2 * MiB]]
    assert rig.run("READ", [0, MiB], MiB) == "DONE", "the agent can still be used"


def test_a_closed_fd_is_an_error(
    make_rig: MakeRig, nixl: ModuleType, data_file: Path, memory: Memory
) -> None:
    fd = os.open(data_file, os.O_RDWR | os.O_DIRECT)
    rig = make_rig(fd)
    os.close(fd)
    with pytest.raises(nixl._bindings.nixlBackendError):
        rig.run("READ", [0, MiB], MiB)
    assert blocks(memory)[0] == UNTOUCHED


def test_writing_to_a_read_only_fd_is_an_error(make_rig: MakeRig, nixl: ModuleType, data_file: Path) -> None:
    fd = os.open(data_file, os.O_RDONLY | os.O_DIRECT)
    with pytest.raises(nixl._bindings.nixlBackendError):
        make_rig(fd).run("WRITE", [0, MiB], MiB)
    os.close(fd)


def test_ranges_outside_the_registered_file_are_refused(make_rig: MakeRig, nixl: ModuleType, fd: int) -> None:
    with pytest.raises(nixl._bindings.nixlNotFoundError):
        make_rig(fd).run("READ", [BEYOND], MiB)


def test_contiguous_ranges_are_merged_unless_told_otherwise(make_rig: MakeRig, fd: int) -> None:
    rig = make_rig(fd)
    for merge, count in ((True, 1), (False, BLOCKS)):
        handle = rig.prepare("READ", [i * MiB for i in range(BLOCKS)], MiB, merge=merge)
        assert rig.wait(handle, rig.agent.transfer(handle)) == "DONE"
        telemetry = rig.agent.get_xfer_telemetry(handle)
        assert (telemetry.descCount, telemetry.totalBytes) == (count, BLOCKS * MiB)
        rig.agent.release_xfer_handle(handle)


def test_arrays_and_tuples_describe_the_same_ranges(
    make_rig: MakeRig, fd: int, memory: Memory, data: bytes
) -> None:
    """Arrays of N x 3 are about 90 times cheaper to prepare."""
    rig = make_rig(fd)
    local = [(memory.ctypes.data + i * MiB, MiB, 0) for i in (0, 2)]
    remote = [(i * MiB, MiB, fd) for i in (5, 1)]
    for form in (lambda rows: rows, lambda rows: np.array(rows, np.uint64)):
        memory[:] = 0x11
        descs = [
            rig.agent.get_xfer_descs(form(rows), kind) for rows, kind in ((local, "DRAM"), (remote, "FILE"))
        ]
        handle = rig.agent.initialize_xfer("READ", *descs, "rig")
        assert rig.wait(handle, rig.agent.transfer(handle)) == "DONE"
        assert blocks(memory)[:3] == [data[5 * MiB : 6 * MiB], UNTOUCHED, data[MiB : 2 * MiB]]


def test_a_released_read_still_writes_into_the_buffer(nixl: ModuleType, memory: Memory) -> None:
    """A pipe makes the read wait as long as the test likes; a slow drive does the same."""
    source, sink = os.pipe()
    with Rig(nixl, "POSIX", (memory.ctypes.data, MiB, "DRAM"), (source, MiB), {"use_uring": "true"}) as rig:
        handle = rig.prepare("READ", [0], 4096)
        assert rig.agent.transfer(handle) == "PROC"
        rig.agent.release_xfer_handle(handle)
        assert memory[0] == 0x11
        os.write(sink, b"\x22" * 4096)
        end = time.monotonic() + 60
        while memory[0] == 0x11 and time.monotonic() < end:
            time.sleep(0.01)
        assert memory[:4096].tobytes() == b"\x22" * 4096
    os.close(source)
    os.close(sink)

"""NIXL 1.5.1, GDS_MT and GDS plugins: content, and what a caller learns about faults.

GDS_MT calls cuFileRead and cuFileWrite from threads; GDS uses cuFile's batches, from a pool of 16 x 128.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cudasim.tests.nixl_rig import Rig

MiB = 1 << 20
BLOCKS = 8
# Backwards, so that no two ranges are contiguous in memory and file.
BACKWARDS = [(BLOCKS - 1 - i) * MiB for i in range(BLOCKS)]
UNTOUCHED = b"\x11" * MiB
CALLS = {
    ("GDS_MT", "READ"): "cuFileRead",
    ("GDS_MT", "WRITE"): "cuFileWrite",
    ("GDS", "READ"): "batch.read",
    ("GDS", "WRITE"): "batch.write",
}

pytestmark = pytest.mark.own_process(NIXL_LOG_LEVEL="FATAL")


@pytest.fixture
def buf(gpu: ModuleType) -> Iterator[Any]:
    buf = gpu.DeviceBuffer(BLOCKS * MiB)
    buf.put(UNTOUCHED * BLOCKS)
    yield buf
    buf.free()


@pytest.fixture
def open_rig(nixl: ModuleType, buf: Any, data: bytes, data_file: Path) -> Iterator[Callable[[str], Rig]]:
    """Rigs for the named backend, each with an fd of its own."""
    with ExitStack() as stack:

        def make(backend: str) -> Rig:
            fd = os.open(data_file, os.O_RDWR | os.O_DIRECT)
            stack.callback(os.close, fd)
            return stack.enter_context(Rig(nixl, backend, (buf.ptr, buf.nbytes, "VRAM"), (fd, len(data))))

        yield make


@pytest.fixture(params=["GDS_MT", "GDS"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig(open_rig: Callable[[str], Rig], backend: str) -> Rig:
    return open_rig(backend)


def expected(data: bytes) -> list[bytes]:
    return [data[offset : offset + MiB] for offset in BACKWARDS]


def blocks(buf: Any) -> list[bytes]:
    return [buf.get(i * MiB, MiB) for i in range(BLOCKS)]


# ---- content and path ----


def test_a_read_puts_each_block_in_its_place_directly(
    gpu: ModuleType, rig: Rig, buf: Any, data: bytes
) -> None:
    assert rig.run("READ", BACKWARDS, MiB) == "DONE"
    assert blocks(buf) == expected(data)
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (BLOCKS * MiB, 0)


def test_a_write_puts_each_block_in_its_place_directly(
    gpu: ModuleType, rig: Rig, buf: Any, data: bytes, data_file: Path
) -> None:
    buf.put(b"".join(expected(data)[::-1]))
    assert rig.run("WRITE", BACKWARDS, MiB) == "DONE"
    assert data_file.read_bytes() == b"".join(expected(data))
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (BLOCKS * MiB, 0)


def test_an_unaligned_offset_is_right_and_counted_as_fallback(
    gpu: ModuleType, rig: Rig, buf: Any, data: bytes
) -> None:
    assert rig.run("READ", [123], MiB) == "DONE"
    assert buf.get(0, MiB) == data[123 : 123 + MiB]
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (0, MiB)


def test_contiguous_ranges_are_merged_unless_told_otherwise(gpu: ModuleType, rig: Rig) -> None:
    forwards = sorted(BACKWARDS)
    for merge, reads in ((True, 1), (False, BLOCKS)):
        gpu.reset_stats()
        assert rig.run("READ", forwards, MiB, merge=merge) == "DONE"
        assert gpu.stats().reads == reads


def test_everything_is_given_back(gpu: ModuleType, open_rig: Callable[[str], Rig], backend: str) -> None:
    before = (gpu.stats().handles, gpu.stats().buffers)
    with open_rig(backend) as rig:
        rig.run("READ", BACKWARDS, MiB)
        assert (gpu.stats().handles, gpu.stats().buffers) != before
        rig.registered, registered = [], rig.registered
        for descs in registered:
            rig.agent.deregister_memory(descs)
    assert (gpu.stats().handles, gpu.stats().buffers) == before


# ---- faults ----

FAULTS = [("READ", "errno:5"), ("READ", "op:5030"), ("READ", "short:4096"), ("WRITE", "errno:28")]


@pytest.mark.parametrize(("op", "fault"), FAULTS)
def test_gds_mt_raises_when_a_range_fails_or_is_short(
    gpu: ModuleType,
    nixl: ModuleType,
    open_rig: Callable[[str], Rig],
    buf: Any,
    data: bytes,
    op: str,
    fault: str,
) -> None:
    rig = open_rig("GDS_MT")
    gpu.cufile_faults(f"{CALLS['GDS_MT', op]}@3={fault}")
    with pytest.raises(nixl._bindings.nixlBackendError):
        rig.run(op, BACKWARDS, MiB)
    assert rig.run("READ", BACKWARDS, MiB) == "DONE", "the agent can still be used"
    if op == "READ":
        assert blocks(buf) == expected(data)


@pytest.mark.parametrize(("op", "fault"), FAULTS)
def test_gds_reports_done_although_a_range_failed_or_was_short(
    gpu: ModuleType,
    open_rig: Callable[[str], Rig],
    buf: Any,
    data: bytes,
    data_file: Path,
    op: str,
    fault: str,
) -> None:
    """Silent loss, as observed in 1.5.1. When this test fails after an upgrade, NIXL has been mended."""
    rig = open_rig("GDS")
    gpu.cufile_faults(f"{CALLS['GDS', op]}@3={fault}")
    assert rig.run(op, BACKWARDS, MiB) == "DONE"
    if op == "READ":
        wrong = [
            i for i, (got, want) in enumerate(zip(blocks(buf), expected(data), strict=True)) if got != want
        ]
    else:
        written = data_file.read_bytes()
        wrong = [i for i, offset in enumerate(BACKWARDS) if written[offset : offset + MiB] != UNTOUCHED]
    assert len(wrong) == 1


def test_gds_raises_when_a_batch_is_refused(
    gpu: ModuleType, nixl: ModuleType, open_rig: Callable[[str], Rig]
) -> None:
    rig = open_rig("GDS")
    gpu.cufile_faults("cuFileBatchIOSubmit=op:5035")
    with pytest.raises(nixl._bindings.nixlBackendError):
        rig.run("READ", BACKWARDS, MiB)


def test_gds_reports_done_before_the_data_is_there_once_a_status_call_failed(
    gpu: ModuleType, open_rig: Callable[[str], Rig], buf: Any, data: bytes
) -> None:
    """The batch goes back to the pool with its event unread, and the next transfer takes that for its own."""
    rig = open_rig("GDS")
    gpu.cufile_faults("cuFileBatchIOGetStatus=op:5041")
    assert rig.run("READ", [0], MiB) == "DONE"
    until_it_holds(buf, data[:MiB])  # that read has really ended
    buf.put(UNTOUCHED)
    gpu.cufile_faults("batch.read@1+1=delay:3000000")
    assert rig.run("READ", [MiB], MiB) == "DONE"
    assert buf.get(0, MiB) == UNTOUCHED
    until_it_holds(buf, data[MiB : 2 * MiB])


def until_it_holds(buf: Any, content: bytes) -> None:
    end = time.monotonic() + 60
    while buf.get(0, len(content)) != content:
        assert time.monotonic() < end, "the bytes never came"
        time.sleep(0.05)
    time.sleep(0.1)  # the call that brought them returns


def test_gds_has_room_for_2048_requests(nixl: ModuleType, open_rig: Callable[[str], Rig]) -> None:
    assert open_rig("GDS").run("READ", [0] * 2048, 512) == "DONE"
    with pytest.raises(nixl._bindings.nixlBackendError):
        open_rig("GDS").run("READ", [0] * 2049, 512)


def test_ranges_outside_the_registered_file_are_refused(nixl: ModuleType, rig: Rig, data: bytes) -> None:
    for offset in (len(data) - 4096, len(data)):
        with pytest.raises(nixl._bindings.nixlNotFoundError):
            rig.run("READ", [offset], MiB)


def test_a_refused_buffer_registration_goes_unnoticed(
    gpu: ModuleType, rig: Rig, backend: str, buf: Any, data: bytes
) -> None:
    other = gpu.DeviceBuffer(MiB)
    gpu.cufile_faults("cuFileBufRegister=op:5036")
    assert rig.agent.register_memory([(other.ptr, MiB, 0, "")], "VRAM", backends=[backend])
    rig.address = other.ptr
    assert rig.run("READ", [0], MiB) == "DONE"
    assert other.get() == data[:MiB]
    assert (gpu.stats().direct_bytes, gpu.stats().unregistered_ops) == (0, 1)


def test_a_refused_file_or_an_unknown_device_is_an_error(
    gpu: ModuleType, nixl: ModuleType, rig: Rig, backend: str, data: bytes, data_file: Path
) -> None:
    fd = os.open(data_file, os.O_RDWR | os.O_DIRECT)
    gpu.cufile_faults("cuFileHandleRegister=op:5008")
    with pytest.raises(nixl._bindings.nixlBackendError):
        rig.agent.register_memory([(0, len(data), fd, "")], "FILE", backends=[backend])
    os.close(fd)
    other = gpu.DeviceBuffer(MiB)
    with pytest.raises(nixl._bindings.nixlBackendError):
        rig.agent.register_memory([(other.ptr, MiB, 7, "")], "VRAM", backends=[backend])


def test_releasing_a_handle_in_flight_waits(
    gpu: ModuleType, rig: Rig, backend: str, buf: Any, data: bytes
) -> None:
    gpu.cufile_faults(f"{CALLS[backend, 'READ']}=delay:2000000")
    handle = rig.prepare("READ", [0], MiB)
    assert rig.agent.transfer(handle) == "PROC"
    rig.agent.release_xfer_handle(handle)
    assert buf.get(0, MiB) == data[:MiB]

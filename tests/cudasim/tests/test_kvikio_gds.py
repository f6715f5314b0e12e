"""kvikio 26.10 with compat mode OFF: its GDS path, and what a caller learns about faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

KiB, MiB = 1 << 10, 1 << 20
FIXED_FLAGS = 7  # stream registration: file offset, buffer offset and size do not change after submission

# kvikio wants a cuFile configuration file for stream-ordered I/O, whatever is in it.
pytestmark = pytest.mark.own_process(
    KVIKIO_COMPAT_MODE="OFF", CUFILE_ENV_PATH_JSON=Path(__file__).with_name("cufile.json")
)


@pytest.fixture
def buf(gpu: ModuleType, kvikio: ModuleType) -> Iterator[Any]:
    buf = gpu.DeviceBuffer(8 * MiB)
    kvikio.memory_register(buf)
    yield buf
    kvikio.memory_deregister(buf)
    buf.free()


@pytest.fixture
def file(buf: Any, kvikio: ModuleType, data_file: Path) -> Iterator[Any]:
    with kvikio.CuFile(data_file, "r") as f:
        yield f


@pytest.fixture
def stream(gpu: ModuleType, kvikio: ModuleType) -> Iterator[Any]:
    stream = gpu.Stream()
    kvikio.stream_register(stream.ptr, FIXED_FLAGS)
    yield stream
    kvikio.stream_deregister(stream.ptr)
    stream.destroy()


# ---- content and path ----


def test_the_driver_appears_to_support_gds(kvikio: ModuleType) -> None:
    assert kvikio.cufile_driver.get("is_gds_available")
    assert kvikio.cufile_driver.libcufile_version() == (1, 20)
    assert not kvikio.defaults.is_compat_mode_preferred()


def test_an_aligned_read_is_all_direct(gpu: ModuleType, file: Any, buf: Any, data: bytes) -> None:
    assert file.read(buf) == len(data)
    assert buf.get() == data
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (len(data), 0)


@pytest.mark.parametrize(("offset", "size"), [(1, 100000), (4095, 4097), (8192, 12345), (7, 3)])
def test_an_unaligned_read_is_right_and_counted_as_fallback(
    gpu: ModuleType, file: Any, buf: Any, data: bytes, offset: int, size: int
) -> None:
    assert file.raw_read(buf, size, offset, 13) == size
    assert buf.get(13, size) == data[offset : offset + size]
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (0, size)


def test_a_pread_in_several_tasks_is_right(gpu: ModuleType, file: Any, buf: Any, data: bytes) -> None:
    assert file.pread(buf, size=5 * MiB, file_offset=12288, task_size=MiB).get() == 5 * MiB
    assert buf.get(0, 5 * MiB) == data[12288 : 12288 + 5 * MiB]
    assert gpu.stats().reads == 5


def test_aligned_and_unaligned_writes_are_right(
    gpu: ModuleType, kvikio: ModuleType, buf: Any, data: bytes, tmp_path: Path
) -> None:
    buf.put(data)
    with kvikio.CuFile(tmp_path / "copy", "w") as f:
        assert f.write(buf) == len(data)
        assert f.raw_write(buf, 5000, len(data) + 1, 3) == 5000
    assert (tmp_path / "copy").read_bytes() == data + b"\0" + data[3:5003]
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (len(data), 5000)


@pytest.mark.parametrize(("size", "calls"), [(16 * KiB - 1, 0), (16 * KiB, 1)])
def test_requests_under_gds_threshold_bypass_cufile(
    gpu: ModuleType, file: Any, buf: Any, data: bytes, size: int, calls: int
) -> None:
    assert file.pread(buf, size).get() == size
    assert buf.get(0, size) == data[:size]
    assert gpu.stats().reads == calls


def test_host_buffers_bypass_cufile(gpu: ModuleType, file: Any, data: bytes) -> None:
    host = np.zeros(MiB, np.uint8)
    assert file.read(host) == MiB
    assert host.tobytes() == data[:MiB]
    assert gpu.stats().reads == 0


# ---- short transfers: not errors here ----


def test_reads_over_the_end_are_short(file: Any, buf: Any, data: bytes) -> None:
    end = len(data)
    assert file.raw_read(buf, 64 * KiB, end - 1000) == 1000
    assert file.raw_read(buf, 4096, end) == 0
    assert file.pread(buf, size=MiB, file_offset=end - 1000).get() == 1000
    with pytest.raises(RuntimeError, match="EOF"):  # under gds_threshold it is the POSIX path
        file.pread(buf, size=8 * KiB, file_offset=end - 1000).get()


def test_a_short_task_leaves_a_hole_that_only_the_byte_count_shows(
    gpu: ModuleType, file: Any, buf: Any, data: bytes
) -> None:
    buf.put(b"\x11" * (4 * MiB))
    gpu.cufile_faults("cuFileRead@1=short:4096")
    assert file.pread(buf, size=4 * MiB, task_size=MiB).get() == 3 * MiB + 4096
    assert buf.get(MiB, 3 * MiB) == data[MiB : 4 * MiB]
    assert buf.get(4096, 16) == b"\x11" * 16


def test_a_short_write_is_not_an_error(gpu: ModuleType, kvikio: ModuleType, buf: Any, tmp_path: Path) -> None:
    with kvikio.CuFile(tmp_path / "out", "w") as f:
        gpu.cufile_faults("cuFileWrite=short:4096")
        assert f.raw_write(buf, MiB) == 4096


# ---- errors ----


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("errno:5", "Operation not permitted"),  # EIO, but kvikio loses it: this is errno 1, from the -1
        ("op:5030", "internal error"),
        ("op:5036", "failed to allocate pinned GPU Memory"),
    ],
)
@pytest.mark.parametrize("tasks", [1, 4])
def test_a_failed_read_raises_but_its_errno_is_lost(
    gpu: ModuleType, file: Any, buf: Any, fault: str, message: str, tasks: int
) -> None:
    gpu.cufile_faults(f"cuFileRead@{tasks}={fault}")
    with pytest.raises(RuntimeError, match=message):
        file.pread(buf, size=4 * MiB, task_size=4 * MiB // tasks).get()


@pytest.mark.parametrize(
    ("fault", "message"), [("errno:28", "No space left on device"), ("op:5030", "internal error")]
)
def test_a_failed_write_keeps_its_errno(
    gpu: ModuleType, kvikio: ModuleType, buf: Any, tmp_path: Path, fault: str, message: str
) -> None:
    with kvikio.CuFile(tmp_path / "out", "w") as f:
        gpu.cufile_faults(f"cuFileWrite={fault}")
        with pytest.raises(RuntimeError, match=message):
            f.raw_write(buf, MiB)


def test_misuse_raises(gpu: ModuleType, kvikio: ModuleType, file: Any, buf: Any) -> None:
    with pytest.raises(RuntimeError, match="access beyond mapped size"):
        file.raw_read(buf, 4096, 0, 8 * MiB - 100)
    with pytest.raises(RuntimeError, match="Bad file descriptor"):
        file.raw_write(buf, 4096)
    with pytest.raises(RuntimeError, match="already registered"):
        kvikio.memory_register(buf)
    other = gpu.DeviceBuffer(MiB)
    with pytest.raises(RuntimeError, match="lookup failure"):
        kvikio.memory_deregister(other)
    gpu.cufile_faults("cuFileBufRegister=op:5036")
    with pytest.raises(RuntimeError, match="pinned GPU Memory"):
        kvikio.memory_register(other)
    gpu.cuda_faults("cuMemGetAddressRange=cu:719")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        file.read(buf)


def test_a_file_that_cufile_refuses_is_an_error(gpu: ModuleType, kvikio: ModuleType, data_file: Path) -> None:
    gpu.cufile_faults("cuFileHandleRegister=op:5008")
    with pytest.raises(RuntimeError, match="not supported on current file"):
        kvikio.CuFile(data_file, "r")


def test_closing_the_fd_behind_cufile_is_not_noticed_by_a_read(
    kvikio: ModuleType, buf: Any, data: bytes, data_file: Path
) -> None:
    """fileno() is the buffered fd; cuFile holds the one with O_DIRECT."""
    f = kvikio.CuFile(data_file, "r")
    os.close(f.fileno())
    assert f.raw_read(buf, 4096) == 4096
    assert buf.get(0, 4096) == data[:4096]


# ---- stream-ordered ----


def test_a_stream_read_is_done_only_after_synchronising(
    gpu: ModuleType, file: Any, buf: Any, stream: Any, data: bytes
) -> None:
    buf.put(b"\x11" * MiB)
    gpu.cufile_faults("async.read=delay:300000")
    future = file.raw_read_async(buf, stream.ptr, MiB, 4096, 0)
    assert not stream.idle()
    assert buf.get(0, 16) == b"\x11" * 16
    assert future.check_bytes_done() == MiB
    assert buf.get(0, MiB) == data[4096 : 4096 + MiB]
    assert gpu.stats().async_ops == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [("async.read=errno:5", "Operation not permitted"), ("async.read=op:5030", "internal error")],
)
def test_a_failed_stream_read_raises_when_its_bytes_are_asked_for(
    gpu: ModuleType, file: Any, buf: Any, stream: Any, fault: str, message: str
) -> None:
    gpu.cufile_faults(fault)
    future = file.raw_read_async(buf, stream.ptr, MiB, 4096, 0)
    with pytest.raises(RuntimeError, match=message):
        future.check_bytes_done()


def test_a_stream_read_can_be_short_or_refused(
    gpu: ModuleType, file: Any, buf: Any, stream: Any, data: bytes
) -> None:
    assert file.raw_read_async(buf, stream.ptr, MiB, len(data) - 1000, 0).check_bytes_done() == 1000
    gpu.cufile_faults("cuFileReadAsync=op:5038")
    with pytest.raises(RuntimeError, match="stream operation not supported"):
        file.raw_read_async(buf, stream.ptr, MiB, 0, 0)

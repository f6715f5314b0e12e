"""The simulated cuFile: registration rules, transfers against a model, counters, strict mode, batches."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

MiB = 1 << 20
NOT_SUPPORTED, RANGE_ERROR, BEYOND_MAPPING, ALREADY_REGISTERED = 5008, 5014, 5017, 5023
NOT_REGISTERED, FILE_NOT_REGISTERED, FILE_ALREADY_REGISTERED, PINNING_FAILED = 5024, 5027, 5028, 5036

pytestmark = pytest.mark.own_process(CUFILESIM_PINNED_KB=16384)


class Error(ctypes.Structure):
    _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]


class Handle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("handle", ctypes.c_void_p)]


class Descr(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle", Handle), ("ops", ctypes.c_void_p)]


class CuFile:
    """The C API, with the codes it returns."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        for name in ("cuFileHandleRegister", "cuFileBufRegister", "cuFileBufDeregister"):
            getattr(lib, name).restype = Error
        for name in ("cuFileRead", "cuFileWrite"):
            getattr(lib, name).restype = ctypes.c_ssize_t
            getattr(lib, name).argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int64,
                ctypes.c_int64,
            ]

    def open(self, fd: int) -> tuple[int, ctypes.c_void_p]:
        handle, descr = ctypes.c_void_p(), Descr(type=1, handle=Handle(fd=fd))
        return self.lib.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(descr)).err, handle

    def register(self, ptr: int, size: int) -> int:
        return int(self.lib.cuFileBufRegister(ctypes.c_void_p(ptr), ctypes.c_size_t(size), 0).err)

    def deregister(self, ptr: int) -> int:
        return int(self.lib.cuFileBufDeregister(ctypes.c_void_p(ptr)).err)

    def read(self, handle: ctypes.c_void_p | None, ptr: int, size: int, offset: int, at: int = 0) -> int:
        return int(self.lib.cuFileRead(handle, ptr, size, offset, at))

    def write(self, handle: ctypes.c_void_p, ptr: int, size: int, offset: int, at: int = 0) -> int:
        return int(self.lib.cuFileWrite(handle, ptr, size, offset, at))


@pytest.fixture
def cufile(gpu: ModuleType) -> CuFile:
    return CuFile(gpu.cufile())


@pytest.fixture
def fd(data_file: Path) -> Iterator[int]:
    fd = os.open(data_file, os.O_RDWR | os.O_DIRECT)
    yield fd
    os.close(fd)


@pytest.fixture
def handle(cufile: CuFile, fd: int) -> Iterator[ctypes.c_void_p]:
    err, handle = cufile.open(fd)
    assert err == 0
    yield handle
    cufile.lib.cuFileHandleDeregister(handle)


# ---- registration ----


def test_a_file_is_registered_once(cufile: CuFile, handle: ctypes.c_void_p, fd: int) -> None:
    assert cufile.open(fd)[0] == FILE_ALREADY_REGISTERED


def test_registered_buffers_must_be_whole_and_apart(gpu: ModuleType, cufile: CuFile) -> None:
    buf = gpu.DeviceBuffer(MiB)
    assert cufile.register(buf.ptr, MiB + 1) == RANGE_ERROR
    assert cufile.register(buf.ptr + 8192, 4096) == 0
    assert cufile.register(buf.ptr, 65536) == ALREADY_REGISTERED, "overlaps from below"
    assert cufile.register(buf.ptr + 8192 + 2048, 4096) == ALREADY_REGISTERED, "overlaps from above"
    assert cufile.deregister(buf.ptr + 8192) == 0
    assert cufile.deregister(buf.ptr + 8192) == NOT_REGISTERED


def test_pinned_memory_has_a_limit(gpu: ModuleType, cufile: CuFile) -> None:
    bufs = [gpu.DeviceBuffer(10 * MiB) for _ in range(2)]
    assert cufile.register(bufs[0].ptr, 10 * MiB) == 0
    assert cufile.register(bufs[1].ptr, 10 * MiB) == PINNING_FAILED
    assert cufile.deregister(bufs[0].ptr) == 0
    assert cufile.register(bufs[1].ptr, 10 * MiB) == 0
    assert cufile.deregister(bufs[1].ptr) == 0


# ---- transfers ----


@pytest.mark.parametrize("registered", [True, False])
def test_any_alignment_reads_and_writes_the_right_bytes(
    gpu: ModuleType, cufile: CuFile, handle: ctypes.c_void_p, data: bytes, data_file: Path, registered: bool
) -> None:
    rng = random.Random(3)
    model = bytearray(data)
    buf = gpu.DeviceBuffer(MiB)
    if registered:
        assert cufile.register(buf.ptr, MiB) == 0
    for _ in range(200):
        n = rng.choice([1, 511, 512, 4096, 4097, 65536, 100000])
        at = rng.choice([0, 1, 512, 4096, 5000])
        offset = rng.choice([rng.randrange(len(data)), rng.randrange(0, len(data), 4096), len(model)])
        if rng.random() < 0.5:
            content = rng.randbytes(n)
            buf.put(content, at)
            assert cufile.write(handle, buf.ptr, n, offset, at) == n
            model[offset : offset + n] = content
        else:
            want = bytes(model[offset : offset + n])
            assert cufile.read(handle, buf.ptr, n, offset, at) == len(want)
            assert buf.get(at, len(want)) == want
    assert data_file.read_bytes() == bytes(model)
    if registered:
        assert cufile.deregister(buf.ptr) == 0


def test_reads_are_short_at_the_end_of_the_file(
    gpu: ModuleType, cufile: CuFile, handle: ctypes.c_void_p, data: bytes
) -> None:
    buf = gpu.DeviceBuffer(8192)
    assert cufile.read(handle, buf.ptr, 8192, len(data) - 100) == 100
    assert cufile.read(handle, buf.ptr, 8192, len(data)) == 0
    assert gpu.stats().short_ops == 2


def test_what_is_not_registered_is_refused(gpu: ModuleType, cufile: CuFile, handle: ctypes.c_void_p) -> None:
    buf = gpu.DeviceBuffer(MiB)
    assert cufile.register(buf.ptr, MiB) == 0
    assert cufile.read(handle, buf.ptr, 4096, 0, MiB - 1) == -BEYOND_MAPPING
    assert cufile.read(None, buf.ptr, 4096, 0) == -FILE_NOT_REGISTERED
    assert cufile.deregister(buf.ptr) == 0
    freed = buf.ptr
    buf.free()
    assert cufile.read(handle, freed, 4096, 0) < 0
    assert gpu.stats().failed_ops == 3


# ---- proof of path ----


def test_bytes_are_counted_as_direct_only_when_all_conditions_hold(
    gpu: ModuleType, cufile: CuFile, handle: ctypes.c_void_p, data_file: Path
) -> None:
    buf, other = gpu.DeviceBuffer(MiB), gpu.DeviceBuffer(MiB)
    assert cufile.register(buf.ptr, MiB) == 0
    assert cufile.read(handle, buf.ptr, 65536, 4096, 8192) == 65536
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (65536, 0)

    gpu.reset_stats()
    assert cufile.read(handle, buf.ptr, 65536, 4095) == 65536
    assert cufile.read(handle, buf.ptr, 65535, 4096) == 65535
    assert cufile.read(handle, buf.ptr, 65536, 4096, 512) == 65536
    assert gpu.stats().unaligned_ops == 3
    assert cufile.read(handle, other.ptr, 65536, 4096) == 65536
    assert gpu.stats().unregistered_ops == 1
    with open(data_file, "rb") as buffered:
        err, plain = cufile.open(buffered.fileno())
        assert err == 0
        assert cufile.read(plain, buf.ptr, 65536, 4096) == 65536
        cufile.lib.cuFileHandleDeregister(plain)
    assert gpu.stats().buffered_fd_ops == 1
    assert (gpu.stats().direct_bytes, gpu.stats().fallback_bytes) == (0, 5 * 65536 - 1)
    assert cufile.deregister(buf.ptr) == 0


def test_strict_mode_refuses_what_is_not_direct(
    gpu: ModuleType, cufile: CuFile, handle: ctypes.c_void_p, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf = gpu.DeviceBuffer(MiB)
    assert cufile.register(buf.ptr, MiB) == 0
    monkeypatch.setenv("CUFILESIM_STRICT", "1")
    assert cufile.read(handle, buf.ptr, 4096, 1) == -NOT_SUPPORTED
    assert cufile.read(handle, buf.ptr, 4096, 4096) == 4096
    assert cufile.deregister(buf.ptr) == 0


# ---- faults ----


def test_faults_reach_the_caller_as_cufile_reports_them(
    gpu: ModuleType, cufile: CuFile, handle: ctypes.c_void_p
) -> None:
    buf = gpu.DeviceBuffer(MiB)
    gpu.cufile_faults("cuFileRead@1=errno:5; cuFileRead@1=op:5030; cuFileRead@1=short:4096")
    assert [cufile.read(handle, buf.ptr, 65536, 0) for _ in range(4)] == [-1, -5030, 4096, 65536]

"""The simulated driver: memory, streams, events, faults."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DELAY_S = 0.03
LOOKS = range(50)  # that a busy machine may take for too long to see what is not done yet
MiB = 1 << 20
INVALID_VALUE, NOT_READY, NOT_SUPPORTED = 1, 600, 801
DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

pytestmark = pytest.mark.own_process(
    CUDASIM_DEVICES=2, CUDASIM_MEM_MB=64, CUDASIM_POISON=0xEE, CUDASIM_STREAM_DELAY_US=int(DELAY_S * 1e6)
)


def copy_to_device(
    gpu: ModuleType, dst: int, src: ctypes.c_void_p | bytes, n: int, stream: int | None
) -> None:
    """cuMemcpyHtoDAsync."""
    gpu.check(
        gpu.cuda().cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(dst), src, ctypes.c_size_t(n), ctypes.c_void_p(stream)
        )
    )


@pytest.fixture
def pinned(gpu: ModuleType) -> ctypes.c_void_p:
    """1 MiB of pinned host memory, all 'B'."""
    p = ctypes.c_void_p()
    gpu.check(gpu.cuda().cuMemHostAlloc(ctypes.byref(p), ctypes.c_size_t(MiB), 0))
    ctypes.memset(p, ord("B"), MiB)
    return p


# ---- memory ----


@pytest.mark.parametrize(("visible", "outcome"), [("0", -signal.SIGSEGV), ("1", 0)])
def test_a_stray_host_access_to_device_memory_faults(visible: str, outcome: int) -> None:
    code = "import ctypes, simgpu; simgpu.load(); ctypes.memset(simgpu.DeviceBuffer(4096).ptr, 0, 16)"
    env = {**os.environ, "CUDASIM_HOST_VISIBLE": visible, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == outcome


def test_bytes_come_back_from_where_they_were_put(gpu: ModuleType) -> None:
    buf = gpu.DeviceBuffer(MiB)
    buf.put(b"abc", 5)
    assert buf.get(4, 5) == b"\xeeabc\xee", "fresh memory is poisoned"
    assert buf[5:8].get() == b"abc"


def test_a_copy_beyond_the_allocation_is_refused(gpu: ModuleType) -> None:
    buf = gpu.DeviceBuffer(MiB)
    with pytest.raises(gpu.SimError, match="INVALID_VALUE"):
        buf.get(MiB - 8, 16)


def test_memory_runs_out_and_comes_back(gpu: ModuleType) -> None:
    before = gpu.usage()
    with pytest.raises(gpu.SimError, match="OUT_OF_MEMORY"):
        gpu.DeviceBuffer(65 * MiB)
    for _ in range(3):
        buf = gpu.DeviceBuffer(40 * MiB)
        buf.free()
    assert gpu.usage() == before


def test_small_allocations_share_a_page(gpu: ModuleType) -> None:
    addresses = [gpu.DeviceBuffer(600).ptr for _ in range(3)]
    assert all(a % 512 == 0 for a in addresses)
    assert any(a % 4096 for a in addresses)


def test_a_freed_address_is_unknown(gpu: ModuleType) -> None:
    buf = gpu.DeviceBuffer(MiB)
    ptr = buf.ptr
    buf.free()
    buf.ptr = ptr
    with pytest.raises(gpu.SimError, match="INVALID_VALUE"):
        buf.get(0, 1)


def test_each_device_has_its_own_addresses(gpu: ModuleType) -> None:
    here = gpu.DeviceBuffer(4096)
    gpu.use(1)
    there = gpu.DeviceBuffer(4096)
    for buf, device in ((here, 0), (there, 1)):
        ordinal = ctypes.c_int(-1)
        gpu.check(
            gpu.cuda().cuPointerGetAttribute(ctypes.byref(ordinal), DEVICE_ORDINAL, ctypes.c_uint64(buf.ptr))
        )
        assert ordinal.value == device


# ---- streams and events ----


def test_a_stream_copy_is_done_only_after_synchronising(gpu: ModuleType, pinned: ctypes.c_void_p) -> None:
    buf, stream = gpu.DeviceBuffer(MiB), gpu.Stream()
    for _ in LOOKS:
        copy_to_device(gpu, buf.ptr, pinned, MiB, stream.ptr)
        if not (idle := stream.idle()):
            break
    assert not idle
    stream.synchronize()
    assert stream.idle()
    assert buf.get() == b"B" * MiB


def test_a_copy_from_pageable_memory_is_done_when_it_returns(gpu: ModuleType) -> None:
    buf, stream = gpu.DeviceBuffer(4096), gpu.Stream()
    copy_to_device(gpu, buf.ptr, b"x" * 4096, 4096, stream.ptr)
    assert stream.idle()


def test_an_event_makes_one_stream_wait_for_another(gpu: ModuleType, pinned: ctypes.c_void_p) -> None:
    cuda, event = gpu.cuda(), ctypes.c_void_p()
    first, second = gpu.Stream(), gpu.Stream()
    buf = gpu.DeviceBuffer(MiB)
    gpu.check(cuda.cuEventCreate(ctypes.byref(event), 0))
    for _ in LOOKS:
        copy_to_device(gpu, buf.ptr, pinned, MiB, first.ptr)
        gpu.check(cuda.cuEventRecord(event, ctypes.c_void_p(first.ptr)))
        if (state := cuda.cuEventQuery(event)) == NOT_READY:
            break
    assert state == NOT_READY
    gpu.check(cuda.cuStreamWaitEvent(ctypes.c_void_p(second.ptr), event, 0))
    second.synchronize()
    assert first.idle()
    assert cuda.cuEventQuery(event) == 0


@pytest.mark.parametrize(("flags", "ordered"), [(0, True), (1, False)])
def test_the_default_stream_waits_for_blocking_streams_only(
    gpu: ModuleType, pinned: ctypes.c_void_p, flags: int, ordered: bool
) -> None:
    buf, stream = gpu.DeviceBuffer(MiB), gpu.Stream(flags)
    for _ in LOOKS:
        for _ in range(4):  # longer than the one operation of the default stream
            copy_to_device(gpu, buf.ptr, pinned, MiB, stream.ptr)
        gpu.DeviceBuffer(16).put(b"x")
        idle = stream.idle()
        stream.synchronize()
        if ordered or not idle:
            break
    assert idle == ordered


# ---- faults ----


@pytest.mark.parametrize(
    ("spec", "failing"),
    [
        ("cuMemAlloc=cu:2", {1}),
        ("cuMemAlloc@3=cu:2", {3}),
        ("cuMemAlloc@2+2=cu:2", {2, 4, 6}),
        ("cuMemAlloc@1=cu:2; cuMemAlloc@4=cu:2", {1, 5}),  # the second does not count what the first hit
        ("cuMemFree=cu:2", set()),
    ],
)
def test_a_fault_fires_at_its_count(gpu: ModuleType, spec: str, failing: set[int]) -> None:
    gpu.cuda_faults(spec)
    failed = set()
    for i in range(1, 7):
        try:
            gpu.DeviceBuffer(64)
        except gpu.SimError:
            failed.add(i)
    assert failed == failing


@pytest.mark.parametrize(
    "spec", ["cuMemAlloc", "cuMemAlloc=explode", "cuMemAlloc@0=cu:2", "cuMemAlloc@x=cu:2"]
)
def test_a_fault_list_that_is_not_understood_is_refused(gpu: ModuleType, spec: str) -> None:
    with pytest.raises(ValueError, match="not a fault list"):
        gpu.cuda_faults(spec)


def test_a_call_that_is_not_simulated_says_so_and_is_counted(gpu: ModuleType) -> None:
    ptr = ctypes.c_uint64()
    assert gpu.cuda().cuMemAllocManaged(ctypes.byref(ptr), ctypes.c_size_t(4096), 1) == NOT_SUPPORTED
    assert gpu.cuda_calls("(unsupported)") >= 1


def test_loading_after_kvikio_is_refused() -> None:
    code = "import sys, simgpu; sys.modules['kvikio'] = simgpu; simgpu.load()"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert "must come before the import of kvikio" in done.stderr

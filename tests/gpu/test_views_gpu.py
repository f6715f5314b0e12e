"""Pages in memory of torch and CuPy are found where they lie, and their bytes can be moved, whatever allocator they come from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.errors import ArgumentError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.memory.device_memory import DeviceView
from gdsstore.memory.device_views import describe_device, on_device
from tests.cudasim.fixtures import gpu, simulator  # noqa: F401
from tests.gpu.need import PLACES, REAL, memory_of, need, why_no_cufile

PAGE = 8192
PAGES = 6
ROOT = Path(__file__).parents[2]


@pytest.fixture
def torch() -> Any:
    need("real", "torch")
    import torch

    return torch


@pytest.fixture
def cupy() -> Any:
    need("real", "cupy")
    import cupy

    return cupy


@pytest.fixture
def cuda(torch: Any) -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    device.close()


def addresses(pages: Any, page_bytes: int = PAGE) -> list[int]:
    found = describe_device(pages, len(pages), page_bytes, writable=True)
    assert found.device == 0
    assert (found.memory.length.sum(axis=1) == page_bytes).all()
    return [int(address) for address in found.memory.address[:, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["uint8", "float16", "bfloat16", "float8_e4m3fn", "float32"])
def test_pages_of_a_torch_tensor_lie_one_after_the_other(name: str, torch: Any) -> None:
    dtype = getattr(torch, name)
    tensor = torch.zeros(PAGES * PAGE, dtype=torch.uint8, device="cuda:0").view(dtype).view(PAGES, -1)
    assert on_device(tensor)
    base = tensor.data_ptr()
    assert addresses(tensor) == [base + i * PAGE for i in range(PAGES)]
    assert addresses(tensor[1::2]) == [base + i * PAGE for i in (1, 3, 5)]
    assert addresses([tensor[4], tensor[0]]) == [base + 4 * PAGE, base]


@pytest.mark.gpu
def test_a_page_that_is_not_contiguous_is_refused(torch: Any) -> None:
    tensor = torch.zeros(PAGES, 2 * PAGE, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(ArgumentError):
        describe_device(tensor[:, ::2], PAGES, PAGE, writable=True)


@pytest.mark.gpu
def test_a_tensor_comes_with_its_user_s_current_stream(torch: Any) -> None:
    tensor = torch.zeros(PAGES, PAGE, dtype=torch.uint8, device="cuda:0")
    stream = torch.cuda.Stream(device=0)
    with torch.cuda.stream(stream):
        inside = describe_device(tensor, PAGES, PAGE, writable=True).streams
    assert inside == (stream.cuda_stream,)
    assert describe_device(tensor, PAGES, PAGE, writable=True).streams == (
        torch.cuda.current_stream(0).cuda_stream,
    )


@pytest.mark.gpu
def test_host_tensors_are_not_device_memory(torch: Any) -> None:
    for tensor in (
        torch.zeros(PAGES, PAGE, dtype=torch.uint8),
        torch.zeros(PAGES, PAGE, dtype=torch.uint8).pin_memory(),
    ):
        assert not on_device(tensor)


@pytest.mark.gpu
def test_pages_of_a_cupy_array_lie_one_after_the_other(cupy: Any) -> None:
    array = cupy.zeros((PAGES, PAGE), cupy.uint8)
    base = int(array.data.ptr)
    assert on_device(array)
    assert addresses(array) == [base + i * PAGE for i in range(PAGES)]
    assert addresses(array[1::2]) == [base + i * PAGE for i in (1, 3, 5)]
    assert addresses([array[4], array[0]]) == [base + 4 * PAGE, base]
    with pytest.raises(ArgumentError):
        describe_device(array[:, ::2], PAGES, PAGE // 2, writable=True)


@pytest.mark.gpu
def test_a_cupy_array_comes_with_the_stream_that_it_names(cupy: Any) -> None:
    array = cupy.zeros((PAGES, PAGE), cupy.uint8)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        named = array.__cuda_array_interface__.get("stream")
        found = describe_device(array, PAGES, PAGE, writable=True).streams
    assert found == (() if named is None else (named,))
    assert stream is not None


@pytest.mark.gpu
def test_torch_and_cupy_see_the_bytes_of_a_lease(torch: Any, cuda: CudaDevice) -> None:
    with DeviceArena(PAGE) as arena, arena.lease(PAGE, 0) as lease:
        view = arena.view(lease)
        tensor = torch.as_tensor(view, device="cuda:0")
        assert tensor.data_ptr() == lease.address
        tensor.copy_(torch.arange(PAGE, device="cuda:0") % 251)
        torch.cuda.synchronize()
        found = np.zeros(PAGE, np.uint8)
        cuda.copy(found.ctypes.data, lease.address, PAGE)
        assert (found == np.arange(PAGE) % 251).all()


@pytest.mark.parametrize(
    ("where", "source"),
    [
        pytest.param("real", "torch", marks=REAL),
        pytest.param("real", "cupy", marks=REAL),
        pytest.param("simulated", "simgpu", marks=PLACES[1].marks),
    ],
)
def test_any_array_with_the_interface_is_found_in_place(
    where: str, source: str, request: pytest.FixtureRequest
) -> None:
    need(where, *([source] if where == "real" else []))
    if where == "simulated":
        request.getfixturevalue("gpu")
    with memory_of(source, PAGES * PAGE) as memory:
        view = DeviceView(memory.address, memory.nbytes, memory.owner)
        assert on_device(view)
        assert addresses([view], PAGES * PAGE) == [memory.address]


EXPANDABLE = """
import os, sys, tempfile
import numpy as np
import torch
from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import EngineError, GdsStoreError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena

N = 4 << 20

def make():
    if sys.argv[1] == "bounce":
        return BounceEngine(PosixEngine(2), arena_bytes=8 << 20)
    try:
        return KvikioEngine(4)
    except EngineError:
        return KvikioEngine(4, compat=True)

engine = make()
tensor = torch.full((N,), 42, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
try:
    engine.register(tensor.data_ptr(), N)
    print("registered")
except GdsStoreError as error:
    print("refused:", type(error).__name__)
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, N)
engine.attach(fd, N)
def move(op, address):
    plan = RangePlan(np.array([fd], np.int32), np.zeros(1, np.int64), np.array([address], np.uint64), np.array([N]))
    assert engine.submit(op, plan).wait(60).complete(plan).all(), op
move(Op.WRITE, tensor.data_ptr())
assert open(sys.argv[2], "rb").read() == bytes([42]) * N
tensor.zero_()
torch.cuda.synchronize()
move(Op.READ, tensor.data_ptr())
assert bool((tensor == 42).all())
arena = DeviceArena(N, registrars=[engine])  # ours does not come from torch's allocator
lease = arena.lease(N, 0)
move(Op.READ, lease.address)
assert bool((torch.as_tensor(arena.view(lease), device="cuda:0") == 42).all())
lease.release()
assert arena.close(10)
engine.deregister(tensor.data_ptr())
engine.detach(fd)
engine.close(10)
print("moved")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["bounce", "kvikio"])
def test_memory_in_expandable_segments_moves_whether_it_can_be_registered_or_not(
    engine: str, tmp_path: Path, torch: Any
) -> None:
    """Mooncake#2511. The allocator's setting is the process's, hence one of its own."""
    need("real", "torch", *(["kvikio"] if engine == "kvikio" else []))
    if engine == "kvikio" and (reason := why_no_cufile()):
        pytest.skip(reason)
    setting = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE, engine, str(tmp_path / "file")],
        cwd=ROOT,
        env={**os.environ, **setting},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "moved"

"""Gather, scatter and sums on a real GPU equal the plain model, by compiled kernels and by copies, with torch beside them."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.streams import Event
from gdsstore.transfer.scatter import CopyKernels, PageKernels, TritonKernels, make_kernels
from tests.gpu.need import need
from tests.transfer.scatter_model import (
    BLOCK,
    BYTES,
    SOON_S,
    Case,
    Image,
    check_gather,
    check_scatter,
    check_sums,
    noise,
    odd_cases,
    place,
    pool_cases,
    same,
    seeds,
)

pytestmark = pytest.mark.gpu
several = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TorchMemory:
    """In torch's own memory, as an engine's KV pool is."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.device = CudaDevice(torch.cuda.current_device())
        whole = torch.empty(BYTES + BLOCK, dtype=torch.uint8, device="cuda")
        self.tensor = whole[-whole.data_ptr() % BLOCK :][:BYTES]
        self.address = self.tensor.data_ptr()

    def put(self, image: Image) -> None:
        self.tensor.copy_(self.torch.from_numpy(image))
        self.torch.cuda.synchronize()

    def get(self) -> Image:
        self.torch.cuda.synchronize()
        found: Image = self.tensor.cpu().numpy()
        return found


@pytest.fixture(scope="module")
def memory() -> Iterator[TorchMemory]:
    need("real", "torch", "triton")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        pytest.skip("TRITON_INTERPRET is set: kernels would not run on the GPU")
    memory = TorchMemory(importlib.import_module("torch"))
    yield memory
    memory.device.close()


@pytest.fixture(scope="module", params=["triton", "copies"])
def kernels(request: pytest.FixtureRequest, memory: TorchMemory) -> Iterator[PageKernels]:
    kernels = {"triton": TritonKernels, "copies": CopyKernels}[request.param](memory.device)
    yield kernels
    assert kernels.close(SOON_S)


def test_the_compiled_kernels_are_the_ones_that_are_chosen(memory: TorchMemory) -> None:
    kernels = make_kernels(memory.device)
    assert kernels.name == "triton"
    assert kernels.close(SOON_S)


@several
@given(case=pool_cases(), seed=seeds)
def test_pages_of_every_layout_are_gathered_and_scattered_as_the_model_says(
    kernels: PageKernels, memory: TorchMemory, case: Case, seed: int
) -> None:
    check_gather(kernels, memory, case, noise(seed))
    check_scatter(kernels, memory, case, noise(seed + 1))


@several
@given(case=odd_cases(), seed=seeds)
def test_pieces_of_any_length_at_any_address_are_too(
    kernels: PageKernels, memory: TorchMemory, case: Case, seed: int
) -> None:
    check_gather(kernels, memory, case, noise(seed))
    check_scatter(kernels, memory, case, noise(seed + 1))


@several
@given(seed=seeds)
def test_pages_in_place_are_summed_up_whole(kernels: PageKernels, memory: TorchMemory, seed: int) -> None:
    check_sums(kernels, memory, noise(seed), seed)


@pytest.mark.parametrize("piece_bytes", [256, 1152, 4096, 16 << 10, 1000])
def test_many_records_of_many_pieces(kernels: PageKernels, memory: TorchMemory, piece_bytes: int) -> None:
    """Enough programs to keep all of a GPU's processors at work at once."""
    count = (BYTES // 3) // (64 * piece_bytes)
    case = place(np.full((count, 64), piece_bytes), seed=piece_bytes, align=16)
    check_gather(kernels, memory, case, noise(1))
    check_scatter(kernels, memory, case, noise(2), np.arange(count) % 3 > 0)


def test_work_begins_after_what_torch_has_queued(kernels: PageKernels, memory: TorchMemory) -> None:
    torch = memory.torch
    case, image = place(np.full((4, 32), 1024)), noise(1)
    memory.put(noise(2))
    source = torch.from_numpy(image).cuda()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        memory.tensor.copy_(source)
    kernels.after(Event(memory.device, stream.cuda_stream))
    pending = kernels.gather(case.at(memory))
    assert pending.wait(SOON_S)
    expected = case.gathered(image)
    assert same(memory.get(), expected)
    assert pending.sums.tolist() == case.sums(expected)


def test_threads_that_never_used_cuda_get_their_own_results(
    kernels: PageKernels, memory: TorchMemory
) -> None:
    case, image = place(np.full((8, 32), 1024)), noise(1)
    memory.put(image)
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        only = np.arange(8) == i
        pending = kernels.scatter(case.at(memory), only=only)
        if pending.wait(SOON_S):
            found[i] = pending.sums[only].tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    expected = case.sums(image)
    assert found == {i: [expected[i]] for i in range(8)}

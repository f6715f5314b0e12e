"""Views of device buffers: whoever's array it is, the addresses are those of its pages, and nothing is copied."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gdsstore.errors import ArgumentError
from gdsstore.memory.device_memory import DeviceView
from gdsstore.memory.device_views import DevicePieces, describe_device, on_device

pytestmark = pytest.mark.own_process(CUDASIM_DEVICES=2)

PAGE = 8192


class Array:
    """What CuPy, numba and others offer: the interface, of a part of a simulated buffer."""

    def __init__(self, address: int, like: np.ndarray[Any, Any], **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": like.shape,
            "typestr": like.dtype.str,
            "data": (address, False),
            "strides": like.strides,
            "version": 3,
            **more,
        }


class Tensor:
    """A CUDA tensor, as torch shows one: a CPU tensor that says it is on a device."""

    __module__ = "torch"

    def __init__(self, tensor: torch.Tensor, device: int) -> None:
        self.tensor, self.device = tensor, SimpleNamespace(type="cuda", index=device)

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.tensor[index], self.device.index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.fixture(autouse=True)
def torch_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch here has no CUDA: 70 is the current stream on device 0, 71 on device 1."""
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=device.index + 70)
    )


@pytest.fixture
def buffer(gpu: ModuleType) -> Any:
    buffer = gpu.DeviceBuffer(16 * PAGE)
    yield buffer
    buffer.free()


def test_an_array_with_the_interface_is_described_in_place(buffer: Any) -> None:
    array = Array(buffer.ptr, np.zeros((4, 2, PAGE // 4), np.float16))
    pages = describe_device(array, 4, PAGE, writable=True)
    assert pages.memory.address.tolist() == [[buffer.ptr + i * PAGE] for i in range(4)]
    assert pages.memory.length.tolist() == [[PAGE]] * 4
    assert (pages.device, pages.streams) == (0, ())
    assert pages.memory.owner is array


def test_strides_between_pages_are_followed_and_within_pages_refused(buffer: Any) -> None:
    every_other = np.zeros((8, PAGE), np.uint8)[::2]
    pages = describe_device(Array(buffer.ptr, every_other), 4, PAGE, writable=True)
    assert pages.memory.address[:, 0].tolist() == [buffer.ptr + 2 * i * PAGE for i in range(4)]
    backwards = np.zeros((8, PAGE), np.uint8)[::-1]
    pages = describe_device(Array(buffer.ptr + 7 * PAGE, backwards), 8, PAGE, writable=True)
    assert pages.memory.address[:, 0].tolist() == [buffer.ptr + i * PAGE for i in reversed(range(8))]
    with pytest.raises(ArgumentError, match="contiguous"):
        describe_device(Array(buffer.ptr, np.zeros((4, 2 * PAGE), np.uint8)[:, ::2]), 4, PAGE, writable=True)


def test_dimensions_of_one_may_have_any_stride(buffer: Any) -> None:
    odd = np.lib.stride_tricks.as_strided(np.zeros(PAGE, np.uint8), (1, 1, PAGE), (1, 12345, 1))
    assert describe_device(Array(buffer.ptr, odd), 1, PAGE, writable=True).memory.page_bytes.tolist() == [
        PAGE
    ]


def test_a_tensor_is_described_by_torchs_own_words(buffer: Any) -> None:
    # torch refuses to show bfloat16 and fp8 tensors through the interface.
    tensor = Tensor(torch.zeros((3, PAGE // 2), dtype=torch.bfloat16), 1)
    assert on_device(tensor)
    pages = describe_device(tensor, 3, PAGE, writable=True)
    assert pages.memory.address[:, 0].tolist() == [tensor.data_ptr() + i * PAGE for i in range(3)]
    assert (pages.device, pages.streams) == (1, (71,)), "the caller's stream may be at work on them"
    with pytest.raises(ArgumentError, match="contiguous"):
        describe_device(
            Tensor(torch.zeros((3, 2 * PAGE), dtype=torch.uint8)[:, ::2], 0), 3, PAGE, writable=True
        )


def test_raw_addresses_are_taken_as_they_are(gpu: ModuleType) -> None:
    owner = object()
    pieces = DevicePieces([[1 << 40, 2 << 40]], [PAGE // 2, PAGE // 2], device=1, owner=owner)
    pages = describe_device(pieces, 1, PAGE, writable=True)
    assert pages.memory.address.tolist() == [[1 << 40, 2 << 40]]
    assert (pages.device, pages.memory.owner, pages.streams) == (1, owner, (0,))


def test_a_sequence_has_a_page_in_each_array(buffer: Any) -> None:
    arrays = [DeviceView(buffer.ptr + at * PAGE, PAGE) for at in (5, 1)]
    assert on_device(arrays)
    pages = describe_device(arrays, 2, PAGE, writable=True)
    assert pages.memory.address[:, 0].tolist() == [buffer.ptr + 5 * PAGE, buffer.ptr + PAGE]
    tensors = [Tensor(torch.zeros(PAGE, dtype=torch.uint8), 0) for _ in range(2)]
    pages = describe_device(tensors, 2, PAGE, writable=True)
    assert pages.memory.address[:, 0].tolist() == [tensor.data_ptr() for tensor in tensors]


def test_the_device_is_the_one_that_the_driver_tells(gpu: ModuleType) -> None:
    gpu.use(1)
    there = gpu.DeviceBuffer(PAGE)
    assert describe_device([there], 1, PAGE, writable=True).device == 1
    gpu.use(0)
    here = gpu.DeviceBuffer(PAGE)
    with pytest.raises(ArgumentError, match="on one device"):
        describe_device([here, there], 2, PAGE, writable=True)
    here.free()
    gpu.use(1)
    there.free()


def test_streams_to_wait_for_are_passed_on(buffer: Any) -> None:
    def array(stream: int | None) -> Array:
        return Array(buffer.ptr, np.zeros(PAGE, np.uint8), stream=stream)

    assert describe_device([array(7), array(None), array(1), array(7)], 4, PAGE, writable=False).streams == (
        7,
        1,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask": object()}, "masked"),
        ({"data": (1 << 46, False)}, "does not know this array's address"),
        ({"shape": (), "strides": None}, "first dimension"),
        ({"typestr": "|O"}, "Python objects"),
        ({"strides": (0, 1)}, "same memory|share memory"),
        ({"shape": (3, PAGE), "strides": None}, "2 keys, but memory for 3 pages"),
        ({"shape": (2, PAGE - 1), "strides": None}, f"{PAGE - 1} bytes"),
    ],
)
def test_what_cannot_be_used_is_refused_and_says_why(buffer: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        describe_device(Array(buffer.ptr, np.zeros((2, PAGE), np.uint8), **change), 2, PAGE, writable=True)


def test_a_read_only_array_can_be_saved_and_not_loaded_into(buffer: Any) -> None:
    array = Array(buffer.ptr, np.zeros((2, PAGE), np.uint8), data=(buffer.ptr, True))
    assert len(describe_device(array, 2, PAGE, writable=False).memory) == 2
    with pytest.raises(ArgumentError, match="read-only"):
        describe_device(array, 2, PAGE, writable=True)


def test_host_memory_is_not_taken_for_device_memory(gpu: ModuleType) -> None:
    host = np.zeros((2, PAGE), np.uint8)
    for pages in (host, torch.from_numpy(host), [host[0], host[1]], b"bytes", []):
        assert not on_device(pages)
        with pytest.raises(ArgumentError):
            describe_device(pages, 2, PAGE, writable=True)
    with pytest.raises(ArgumentError, match="does not know"):
        describe_device(Array(host.ctypes.data, host), 2, PAGE, writable=True)

"""Where the bytes of pages lie in device memory, without copying any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.memory.cuda import current_device, device_of
from gdsstore.memory.views import (
    PageMemory,
    checked,
    is_sequence,
    is_tensor,
    joined,
    one_page,
    pieces_memory,
    strided,
    tensor_memory,
)


@dataclass(frozen=True, slots=True)
class DevicePieces:
    """Pages given as raw memory of one device: page i is the bytes at `address[i, 0]`, then those at `address[i, 1]`, and so on.

    Shapes as in `Pieces`. `owner` is kept alive until the call is over. Addresses are trusted. `streams`: handles of the CUDA
    streams that may be at work on the bytes; 0 is the legacy default stream.
    """

    address: npt.ArrayLike
    length: npt.ArrayLike
    device: int  # ordinal
    owner: object = None
    streams: tuple[int, ...] = (0,)


DevicePageSource: TypeAlias = Any
"""`DevicePieces`, a CUDA torch tensor, a CuPy array or another object with `__cuda_array_interface__` whose first dimension
counts pages, or a sequence of tensors and arrays, one a page."""


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Pages on one device.

    `streams`: CUDA streams (handles) that may still be at work on the bytes; whoever reads or writes them waits for these
    first. Of tensors it is the caller's current stream; of arrays what their producer says.
    """

    memory: PageMemory
    device: int  # ordinal
    streams: tuple[int, ...]


def on_device(pages: Any) -> bool:
    """Whether `describe_device` is the one to ask about `pages` (and not `describe`)."""
    if isinstance(pages, DevicePieces):
        return True
    if is_tensor(pages):
        return bool(pages.device.type == "cuda")
    if is_sequence(pages):
        return len(pages) > 0 and on_device(pages[0])
    return _is_cuda_array(pages)


def describe_device(
    pages: DevicePageSource,
    count: int,
    page_bytes: int,
    *,
    writable: bool,
    cuda_driver: Any | None = None,
) -> DevicePages:
    """The memory of `count` pages of `page_bytes` bytes. Raises ArgumentError where they are not that, or not usable."""
    found = _describe(pages, writable, cuda_driver)
    return DevicePages(checked(found.memory, count, page_bytes), found.device, found.streams)


def whole_buffer(buffer: Any, cuda_driver: Any | None = None) -> DevicePages:
    """All bytes of one contiguous CUDA tensor or array, as one page. Raises ArgumentError where it is not that."""
    return _describe([buffer], True, cuda_driver)


def _describe(pages: Any, writable: bool, driver: Any | None) -> DevicePages:
    if isinstance(pages, DevicePieces):
        return DevicePages(
            pieces_memory(pages.address, pages.length, pages.owner), pages.device, tuple(pages.streams)
        )
    if is_tensor(pages):
        if pages.device.type != "cuda":
            raise ArgumentError(f"a tensor on {pages.device} is not in CUDA device memory")
        return DevicePages(tensor_memory(pages, writable), int(pages.device.index), (_current_stream(pages),))
    if is_sequence(pages):
        return _join([_describe(_one_page(page), writable, driver) for page in pages], pages)
    if _is_cuda_array(pages):
        return _cuda_array(pages, writable, driver)
    raise ArgumentError(
        f"device pages must be CUDA tensors, arrays with __cuda_array_interface__ or DevicePieces, not {type(pages).__name__}"
    )


def _join(parts: list[DevicePages], owner: Any) -> DevicePages:
    if not parts:
        raise ArgumentError("no pages: an empty sequence does not say which device it is on")
    devices = sorted({part.device for part in parts})
    if len(devices) > 1:
        raise ArgumentError("the pages of one call must be on one device", devices=devices)
    streams = dict.fromkeys(stream for part in parts for stream in part.streams)
    return DevicePages(joined([part.memory for part in parts], list(owner)), devices[0], tuple(streams))


def _current_stream(tensor: Any) -> int:
    import torch

    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


class _OnePage:
    """An array that is one page: its interface with one more dimension, which not every producer's arrays can be indexed to."""

    def __init__(self, array: Any) -> None:
        self.array = array
        interface = dict(array.__cuda_array_interface__)
        strides = interface.get("strides")
        interface["shape"] = (1, *interface["shape"])
        interface["strides"] = None if strides is None else (0, *strides)
        self.__cuda_array_interface__ = interface


def _one_page(page: Any) -> Any:
    return one_page(page) if is_tensor(page) or not _is_cuda_array(page) else _OnePage(page)


def _is_cuda_array(pages: Any) -> bool:
    return isinstance(getattr(pages, "__cuda_array_interface__", None), dict)


def _cuda_array(pages: Any, writable: bool, driver: Any | None) -> DevicePages:
    """Format: numba's documentation of the CUDA array interface, version 3."""
    interface = pages.__cuda_array_interface__
    shape, (address, read_only) = tuple(interface["shape"]), interface["data"]
    if interface.get("mask") is not None:
        raise ArgumentError("masked arrays cannot be stored")
    if not shape:
        raise ArgumentError("pages must have a first dimension that counts them")
    dtype = np.dtype(interface["typestr"])
    if dtype.hasobject:
        raise ArgumentError("pages of Python objects have no bytes to store")
    if writable and read_only:
        raise ArgumentError("cannot load into a read-only array")
    packed = _packed_strides(shape, dtype.itemsize)
    strides = interface.get("strides")
    strides = packed if strides is None else tuple(strides)
    if any(n > 1 and own != whole for n, own, whole in zip(shape[1:], strides[1:], packed[1:], strict=True)):
        raise ArgumentError("each page must be contiguous; describe scattered ones with DevicePieces")
    # An array without elements may have no memory.
    device = device_of(address, driver) if shape[0] else current_device(driver)
    if device is None:
        raise ArgumentError(
            "the CUDA driver does not know this array's address as device memory", address=hex(address or 0)
        )
    stream = interface.get("stream")
    nbytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    memory = strided(address, shape[0], strides[0], nbytes, pages, writable)
    return DevicePages(memory, device, () if stream is None else (stream,))


def _packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    after = [itemsize]
    for n in reversed(shape[1:]):
        after.append(after[-1] * n)
    return tuple(reversed(after))

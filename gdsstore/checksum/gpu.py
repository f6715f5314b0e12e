"""Raw checksum sums of ranges of a device buffer, by Triton. Neither torch nor triton is imported before the first call."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gdsstore.checksum.definition import BLOCK_BYTES, I64, KEYS
from gdsstore.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    import torch

BLOCKS_PER_PROGRAM = 4  # 16 KiB, the smallest usual page: no program of a small page idles
_WARPS = 4
_MAX_GROUPS = 65535  # CUDA's limit for a grid's second axis


def raw_sums_tensor(
    data: torch.Tensor, offset: I64, nbytes: I64 | int, first_block: I64 | int = 0
) -> torch.Tensor:
    """The raw sums of n ranges of `data`, as an int64 tensor of shape (n,) on its device: the bits of the uint64 sums.

    `data`: contiguous, of any dtype, beginning at a multiple of 16 bytes. `offset`: bytes from its start, multiples of 16.
    `nbytes`: multiples of 4096; 0 gives 0. `first_block`: index in its record of the block with which a range begins.
    `offset` is a host array of shape (n,); the other two are that or one value for all ranges.

    Queued on the device's current stream; returns without waiting for it. Raises ArgumentError for ranges that are not
    whole blocks or not inside `data`, and for a device on which Triton does not run; MissingExtraError without torch or triton.
    """
    pytorch, kernels = _device_code()
    offset, nbytes, first = (
        np.ascontiguousarray(values, np.int64) for values in np.broadcast_arrays(offset, nbytes, first_block)
    )
    _check(data, offset, nbytes, first)
    out: torch.Tensor = pytorch.zeros(len(offset), dtype=pytorch.int64, device=data.device)
    groups = -(-int(nbytes.max(initial=0)) // (BLOCK_BYTES * BLOCKS_PER_PROGRAM))
    if groups == 0:
        return out
    ranges: torch.Tensor = pytorch.from_numpy(np.stack([offset, nbytes, first], axis=1))
    if data.is_cuda:
        ranges = ranges.pin_memory()  # a copy from pageable memory would wait for the stream
    flat = data.reshape(-1).view(pytorch.uint8)
    with pytorch.cuda.device_of(data):
        kernels.raw_sums_kernel[(len(offset), groups)](
            flat[: flat.numel() // 8 * 8].view(pytorch.int64),
            ranges.to(data.device, non_blocking=True),
            _keys_on(data.device),
            out,
            BLOCKS=BLOCKS_PER_PROGRAM,
            num_warps=_WARPS,
        )
    return out


def _check(data: torch.Tensor, offset: I64, nbytes: I64, first: I64) -> None:
    if offset.ndim != 1:
        raise ArgumentError(f"offset and nbytes must have shape (n,), not {offset.shape}")
    if not data.is_contiguous() or data.data_ptr() % 16:
        raise ArgumentError("data must be contiguous and begin at a multiple of 16 bytes")
    size = data.numel() * data.element_size()
    good = (offset >= 0) & (offset % 16 == 0) & (nbytes >= 0) & (nbytes % BLOCK_BYTES == 0) & (first >= 0)
    good &= nbytes <= size - offset
    if not good.all():
        bad = int(good.argmin())
        raise ArgumentError(
            "a checksum range must lie inside the tensor, at a multiple of 16 bytes, and be a multiple of 4096 bytes long",
            range=bad,
            offset=int(offset[bad]),
            nbytes=int(nbytes[bad]),
            first_block=int(first[bad]),
            tensor_bytes=size,
        )
    limit = _MAX_GROUPS * BLOCKS_PER_PROGRAM * BLOCK_BYTES
    if nbytes.max(initial=0) > limit:
        raise ArgumentError("a checksum range is too long for one kernel; split it", limit_bytes=limit)
    if data.device.type == "cpu" and not _interpreted():
        raise ArgumentError("data is in host memory; use gdsstore.checksum.host.raw_sums for its address")


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _device_code() -> tuple[Any, Any]:
    """torch and the kernels."""
    why = "a checksum on the GPU"
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "cuda13", why) from None
    try:
        import triton  # noqa: F401
    except ImportError:
        raise MissingExtraError("triton", "cuda13", why) from None
    from gdsstore.checksum import triton_kernels

    return torch, triton_kernels


@cache
def _keys_on(device: torch.device) -> torch.Tensor:
    """The key table as int64 on a device. Kept for the life of the process: 4 KiB."""
    pytorch, _ = _device_code()
    keys: torch.Tensor = pytorch.from_numpy(KEYS.view(np.int64).copy()).to(device)
    return keys

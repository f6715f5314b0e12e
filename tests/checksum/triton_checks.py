"""Checks of the Triton code, run in processes of their own by test_gpu.py: `python triton_checks.py NAME...`.

Triton decides at import whether it interprets kernels, so that a process can either run them on the CPU or compile them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gdsstore.checksum import gpu
from gdsstore.checksum.definition import BLOCK_BYTES, reference_raw
from gdsstore.checksum.host import raw_sums
from gdsstore.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    import torch

BYTES = np.random.default_rng(11).integers(0, 256, 24 * BLOCK_BYTES, dtype=np.uint8)


def equal() -> None:
    """Kernel, host and reference agree on ranges of all lengths, offsets and places, and on dull data."""
    import torch

    blocks = np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 3, 1])
    offset = np.array([0, 0, 4096, 8192, 16, 4096, 1024, 0, 4096, 8000, 0, 0])
    first = np.array([5, 0, 1, 2, 3, 1 << 40, 0, 9, 8, 7, 1, 1 << 33])
    for data in (BYTES, np.zeros_like(BYTES), np.full_like(BYTES, 0xFF), np.full_like(BYTES, 0x80)):
        aligned = torch.from_numpy(data)
        nbytes = blocks * BLOCK_BYTES
        expected = [
            reference_raw(data[at : at + size].tobytes(), block)
            for at, size, block in zip(offset.tolist(), nbytes.tolist(), first.tolist(), strict=True)
        ]
        kernel = gpu.raw_sums_tensor(aligned, offset, nbytes, first)
        assert kernel.dtype == torch.int64
        assert kernel.numpy().view(np.uint64).tolist() == expected
        address = np.uint64(aligned.data_ptr()) + offset.astype(np.uint64)
        assert raw_sums(address, nbytes, first).tolist() == expected


def shapes() -> None:
    """Any dtype and shape; one length for all; parts of a record add up."""
    import torch

    record = 6 * BLOCK_BYTES
    pages = torch.from_numpy(BYTES).view(torch.bfloat16).reshape(4, 6, -1)
    whole = gpu.raw_sums_tensor(pages, np.arange(4) * record, record)
    expected = [reference_raw(BYTES[i * record :][:record].tobytes()) for i in range(4)]
    assert whole.numpy().view(np.uint64).tolist() == expected
    parts = gpu.raw_sums_tensor(
        pages, np.array([0, 1, 5]) * BLOCK_BYTES, np.array([1, 4, 1]) * BLOCK_BYTES, np.array([0, 1, 5])
    )
    assert int(parts.sum()) % 2**64 == expected[0]
    assert gpu.raw_sums_tensor(pages, np.empty(0, np.int64), np.empty(0, np.int64)).shape == (0,)


def refused() -> None:
    """Ranges outside the tensor or not whole blocks, and tensors that a kernel cannot address."""
    import torch

    data = torch.from_numpy(BYTES)
    for offset, nbytes, first in ((0, 4095, 0), (0, -4096, 0), (8, 4096, 0), (-16, 4096, 0), (0, 4096, -1)):
        _refuses(data, offset, nbytes, first)
    _refuses(data, len(BYTES) - 4080, 4096, 0)
    _refuses(data[:4096], 0, 8192, 0)
    _refuses(data.reshape(2, -1)[:, ::2], 0, 4096, 0)
    _refuses(data[8:], 0, 4096, 0)


def host_memory_without_interpreter() -> None:
    import torch

    _refuses(torch.from_numpy(BYTES), 0, 4096, 0)


def lazy_and_missing() -> None:
    assert "triton" not in sys.modules
    assert "torch" not in sys.modules
    import torch

    sys.modules["triton"] = None  # type: ignore[assignment]  # makes `import triton` raise ImportError
    with pytest.raises(MissingExtraError, match=r"triton.*gdsstore\[cuda13\]"):
        gpu.raw_sums_tensor(torch.zeros(8), np.zeros(1, np.int64), np.zeros(1, np.int64))


def compiled() -> None:
    """Down to machine code for an H100 or H200, which no interpreter vouches for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gdsstore.checksum.triton_kernels import raw_sums_kernel

    arguments = ("data", "ranges", "keys", "out")
    source = ASTSource(
        raw_sums_kernel,
        {**dict.fromkeys(arguments, "*i64"), "BLOCKS": "constexpr"},
        {"BLOCKS": gpu.BLOCKS_PER_PROGRAM},
        {(at,): [["tt.divisibility", 16]] for at in range(len(arguments))},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "ld.global.v2.b64" in result.asm["ptx"]  # 16 bytes a load: alignment reached the compiler
    assert len(result.asm["cubin"]) > 0


def _refuses(data: torch.Tensor, offset: int, nbytes: int, first: int) -> None:
    with pytest.raises(ArgumentError):
        gpu.raw_sums_tensor(data, np.array([offset]), np.array([nbytes]), np.array([first]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()

"""Gather, scatter and sums by Triton kernels on CUDA. Neither torch nor triton is imported before the first use."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.definition import BLOCK_BYTES, KEYS
from gdsstore.errors import DeadlineError, DeviceError, MissingExtraError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.transfer.scatter_memory import Scratch, ScratchPool
from gdsstore.transfer.scatter_pending import Pending
from gdsstore.transfer.scatter_selftest import self_test
from gdsstore.transfer.scatter_work import VECTOR_BYTES, PageKernels, Records

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

BLOCKS_PER_PROGRAM = 4  # 16 KiB, the smallest usual page: no program of a small page idles
_WARPS = 4
_WORD = 8  # bytes of an element of a table, and of a sum
_UNITS = (BLOCK_BYTES, VECTOR_BYTES)
_INTERPRETER_TIMEOUT_S = 60.0
_interpreter = threading.Lock()  # Triton's keeps what it is at in globals


class TritonKernels(PageKernels):
    """One launch a call. Words pass from loads through registers to stores and sums, 16 bytes a thread at a time.

    Pieces that do not all begin and end at multiples of 16 bytes, outside and in the record, are moved byte by byte and
    summed up by a second launch: correct, several times slower, and still without a copy for each piece.
    """

    name = "triton"

    def __init__(self, device: CudaDevice, timeout_s: float = 300.0) -> None:
        """Compiles all kernels (seconds; Triton keeps the results on disk) and tests them, at most `timeout_s`.

        Raises MissingExtraError without torch or triton, DeviceError where they do not work on this device.
        """
        why = "moving pages in device memory by kernels"
        try:
            import triton
        except ImportError:
            raise MissingExtraError("triton", "cuda13", why) from None
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self._torch: Any = None if self._interpreted else _torch_with_cuda(why)
        from gdsstore.transfer import scatter_kernels

        self._kernels = scatter_kernels
        super().__init__(device)
        self._pool = ScratchPool(device, mirrored=True)
        self._keys: Scratch | None = None
        try:
            self._keys = self._pool.take(KEYS.nbytes)
            self._key_table = self._keys.device
            self._keys.array(len(KEYS), np.uint64)[:] = KEYS
            self._stream.copy(self._key_table, self._keys.host, KEYS.nbytes)
            if self._torch is not None:
                self._torch_stream = self._torch.cuda.ExternalStream(self._stream.handle, device.ordinal)
            elif not _host_sees(self._key_table):
                raise DeviceError("Triton's interpreter cannot reach this device's memory")
            self_test(self, device, timeout_s)
        except BaseException:
            self.close(0.0)
            raise

    def _gather(self, pending: Pending, records: Records) -> None:
        self._move(pending, records, gather=True)

    def _scatter(self, pending: Pending, records: Records) -> None:
        self._move(pending, records, gather=False)

    def _move(self, pending: Pending, records: Records, *, gather: bool) -> None:
        n, k = records.length.shape
        blocks = records.record_bytes // BLOCK_BYTES
        alike = bool((records.length == records.length[0]).all())
        length = records.length[:1] if alike else records.length
        one_length = int(length[0, 0]) if (length == length[0, 0]).all() else 0
        ends = np.cumsum(length, axis=1)
        sizes = (0 if alike else k, k, 1 << (k.bit_length() - 1), one_length, records.record_bytes)
        unit = _unit(records.piece[records.length > 0], ends)
        tables = [records.record, ends, records.piece]
        if unit is None:
            whole = np.zeros((n, 3), np.int64)
            whole[:, 0], whole[:, 1] = records.record.view(np.int64), records.record_bytes
            whole[:, 2] = records.first_block
            scratch, (record, end, piece, ranges) = self._upload(pending, n, *tables, whole)
            self._launch(
                self._kernels.move_bytes, n * blocks, record, end, piece, *sizes, blocks, GATHER=gather
            )
            self._launch_sums(n, 1, blocks, scratch, ranges)
        else:
            scratch, (record, end, piece) = self._upload(pending, n, *tables)
            groups = _groups(blocks)
            arguments = (
                record,
                end,
                piece,
                scratch.device,
                self._key_table,
                *sizes,
                groups,
                records.first_block,
            )
            constants = {"UNIT": unit, "BLOCKS": BLOCKS_PER_PROGRAM, "GATHER": gather}
            self._launch(self._kernels.move_units, n * groups, *arguments, **constants)
        self._download(pending, n, scratch)

    def _sum(self, pending: Pending, address: U64, length: I64, first_block: I64) -> None:
        n, k = address.shape
        table = np.stack([address.view(np.int64), length, first_block], axis=2)
        scratch, (ranges,) = self._upload(pending, n, table)
        self._launch_sums(n * k, k, int(length.max()) // BLOCK_BYTES, scratch, ranges)
        self._download(pending, n, scratch)

    def _launch_sums(self, count: int, k: int, blocks: int, scratch: Scratch, ranges: int) -> None:
        """`count` ranges of up to `blocks` blocks, k of them a page."""
        groups = _groups(blocks)
        arguments = (ranges, scratch.device, self._key_table, k, groups)
        self._launch(self._kernels.add_sums, count * groups, *arguments, BLOCKS=BLOCKS_PER_PROGRAM)

    def _upload(self, pending: Pending, n: int, *tables: npt.NDArray[Any]) -> tuple[Scratch, tuple[int, ...]]:
        """n sums that are 0, and then tables of words, as one copy; the tables' addresses on the device."""
        ends = np.cumsum([n, *(table.size for table in tables)]).tolist()
        scratch = pending.keep(self._pool.take(ends[-1] * _WORD))
        words = scratch.array(ends[-1], np.int64)
        words[:n] = 0
        for start, end, table in zip(ends[:-1], ends[1:], tables, strict=True):
            words[start:end] = table.ravel().view(np.int64)
        self._stream.copy(scratch.device, scratch.host, ends[-1] * _WORD)
        return scratch, tuple(scratch.device + start * _WORD for start in ends[:-1])

    def _download(self, pending: Pending, n: int, scratch: Scratch) -> None:
        self._stream.copy(scratch.host, scratch.device, n * _WORD)
        pending.read(lambda: scratch.array(n, np.uint64).copy())

    def _launch(self, kernel: Any, programs: int, *arguments: int, **constants: int) -> None:
        """Raises DeviceError, DeadlineError."""
        if programs == 0:
            return
        with ExitStack() as stack:
            if self._interpreted:
                # The interpreter runs a kernel in this thread and at once. What it would be queued behind must have ended
                # first: this is the one place where a call waits.
                if not self._stream.record().wait(_INTERPRETER_TIMEOUT_S):
                    raise DeadlineError("Triton's interpreter waited too long for the work before a kernel")
                stack.enter_context(_interpreter)
            else:
                # The context first: a new thread has none, and Triton would then take device 0's.
                stack.enter_context(self._device.entered())
                stack.enter_context(self._torch.cuda.device(self._device.ordinal))
                stack.enter_context(self._torch.cuda.stream(self._torch_stream))
            try:
                kernel[(programs,)](*arguments, num_warps=_WARPS, **constants)
            except Exception as error:  # the compiler's, the assembler's, the driver's: each raises its own
                raise DeviceError(
                    f"a Triton kernel could not be started: {type(error).__name__}: {error}",
                    device=self._device.ordinal,
                ) from error

    def _free(self) -> None:
        self._keys = None
        self._pool.close()


def _unit(address: U64, ends: I64) -> int | None:
    """The largest unit in which pieces can be moved that lie at these addresses and end there in their records, or None."""
    if (address % np.uint64(VECTOR_BYTES)).any():
        return None
    return next((unit for unit in _UNITS if not (ends % unit).any()), None)


def _groups(blocks: int) -> int:
    return -(-blocks // BLOCKS_PER_PROGRAM)


def _torch_with_cuda(why: str) -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "cuda13", why) from None
    if not torch.cuda.is_available():
        raise DeviceError("this torch has no CUDA: install a build for CUDA")
    return torch


def _host_sees(address: int) -> bool:
    """Whether the host can read device memory: the simulated GPU's, if asked to. A GPU's would be a crash."""
    reading, writing = os.pipe()
    try:
        # The kernel answers EFAULT where the CPU would get a SIGSEGV.
        return bool(ctypes.CDLL(None).write(writing, ctypes.c_void_p(address), ctypes.c_size_t(1)) == 1)
    finally:
        os.close(reading)
        os.close(writing)

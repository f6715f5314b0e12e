"""A test of page kernels on the device that they are to run on. For those that are compiled it is the warm-up, too."""

from __future__ import annotations

import numpy as np

from gdsstore.checksum.host import raw_sums
from gdsstore.errors import DeadlineError, DeviceError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory.cuda import CudaDevice
from gdsstore.transfer.scatter_memory import ScratchPool
from gdsstore.transfer.scatter_work import PageKernels, Records
from gdsstore.waiting import Deadline

_RECORD_BYTES = 4 * ALIGNMENT
_GAP_BYTES = 32  # between and around pieces
# Whole blocks, multiples of 16 bytes, and anything, each with equal lengths and others: all the ways in which pieces move.
_LENGTHS = ((4096, 8192), (4096, 4096), (16, 4112), (4080, 4080), (1, 4095), (333, 333))


def self_test(kernels: PageKernels, device: CudaDevice, timeout_s: float) -> None:
    """Gather, scatter and sum up a few pages, and compare all bytes and sums.

    Raises DeviceError where the device fails or something is wrong, DeadlineError after `timeout_s`.
    """
    deadline = Deadline(timeout_s)
    pool = ScratchPool(device, mirrored=True)
    try:
        for lengths in _LENGTHS:
            _round_trip(kernels, device, pool, lengths, deadline)
    finally:
        pool.close()


def _round_trip(
    kernels: PageKernels, device: CudaDevice, pool: ScratchPool, lengths: tuple[int, int], deadline: Deadline
) -> None:
    """A record, and twice the room for its page's pieces: gathered from the one, scattered into the other."""
    scratch = pool.take(4 * _RECORD_BYTES)
    record = -(-scratch.device // ALIGNMENT) * ALIGNMENT
    image = scratch.array(3 * _RECORD_BYTES, np.uint8)
    image[:] = np.random.default_rng(len(image)).integers(0, 256, len(image))
    start = 16 if sum(lengths) % 16 == 0 else 1  # addresses are as odd as the lengths
    offsets = (start, start + lengths[0] + _GAP_BYTES)
    model = image.copy()
    page = np.concatenate(
        [_part(image, _RECORD_BYTES + at, n) for at, n in zip(offsets, lengths, strict=True)]
    )
    model[:_RECORD_BYTES] = 0
    model[: len(page)] = page
    for at, piece in zip(offsets, np.split(page, [lengths[0]]), strict=True):
        _part(model, 2 * _RECORD_BYTES + at, len(piece))[:] = piece

    device.copy(record, scratch.host, image.nbytes)
    base, length = np.array([record], np.uint64), np.array([lengths], np.int64)
    whole, zero = np.array([[_RECORD_BYTES]]), np.zeros((1, 1), np.int64)
    source, target = (np.array([offsets], np.uint64) + base + np.uint64(i * _RECORD_BYTES) for i in (1, 2))
    work = [
        kernels.gather(Records(base, _RECORD_BYTES, source, length)),
        kernels.scatter(Records(base, _RECORD_BYTES, target, length)),
        kernels.sums(base[:, None], whole, zero),
    ]
    for pending in work:
        pending.keep(scratch)
    if not all(pending.wait(deadline.left_s) for pending in work):
        raise DeadlineError("a test of moving pages on the device took too long", kernels=kernels.name)
    sums = [int(pending.sums[0]) for pending in work]
    device.copy(scratch.host, record, image.nbytes)
    expected = raw_sums(np.array([model.ctypes.data], np.uint64), whole[0], zero[0])
    if not np.array_equal(image, model) or sums != [int(expected[0])] * len(work):
        raise DeviceError(
            "pages that were moved on the device are not what they should be; its kernels are not used",
            kernels=kernels.name,
            lengths=lengths,
        )


def _part(image: np.ndarray, at: int, nbytes: int) -> np.ndarray:
    return image[at : at + nbytes]

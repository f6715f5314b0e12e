"""Moving pages between records in staging memory and the KV slots of all layers, on the device, and summing them up."""

from __future__ import annotations

import logging

from gdsstore.errors import DeadlineError, DeviceError, MissingExtraError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.transfer.scatter_copies import CopyKernels
from gdsstore.transfer.scatter_pending import Pending
from gdsstore.transfer.scatter_triton import TritonKernels
from gdsstore.transfer.scatter_work import PageKernels, Records

__all__ = ["CopyKernels", "PageKernels", "Pending", "Records", "TritonKernels", "make_kernels"]

log = logging.getLogger(__name__)


def make_kernels(device: CudaDevice, timeout_s: float = 300.0) -> PageKernels:
    """The fastest kernels that were seen to work on this device; `name` says which: "triton" or "copies".

    Takes seconds where Triton has to compile, at most `timeout_s` for what it runs on the device. Raises DeviceError where
    the device itself cannot be used.
    """
    try:
        return TritonKernels(device, timeout_s)
    except (MissingExtraError, DeviceError, DeadlineError) as error:
        log.warning("pages in device memory are moved by single copies, which is slow: %s", error)
    return CopyKernels(device)

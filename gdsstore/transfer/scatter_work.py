"""The contract of moving pages between records in device memory and the pieces that the pages are made of."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError, DeviceError, GdsStoreError
from gdsstore.layout import ALIGNMENT, MAX_PAGE_BYTES
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.streams import Event, Stream
from gdsstore.transfer.scatter_pending import Pending, under_way
from gdsstore.waiting import Deadline

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

log = logging.getLogger(__name__)

VECTOR_BYTES = 16  # what a thread of a GPU loads and stores at once


@dataclass(frozen=True, slots=True)
class Records:
    """n records in device memory, and the k pieces that the page in each is made of.

    `record`: uint64 (n,), addresses, multiples of 4096. `record_bytes`: of each, a multiple of 4096 up to 1 GiB. `piece`:
    uint64 (n, k), addresses of the page's pieces in record order. `length`: int64 (n, k), bytes of the pieces; in the record
    they follow each other from its start, and what is left of it is padding. Addresses are trusted. `first_block`: of parts of
    records, the index in its record of the block with which each begins.

    Raises ArgumentError where this does not fit together.
    """

    record: U64
    record_bytes: int
    piece: U64
    length: I64
    first_block: int = 0

    def __post_init__(self) -> None:
        _check_pieces(self.piece, self.length)
        if self.record.dtype != np.uint64 or self.record.shape != self.piece.shape[:1]:
            raise ArgumentError(f"record must be uint64 of shape ({len(self.piece)},)")
        if not 0 < self.record_bytes <= MAX_PAGE_BYTES or self.record_bytes % ALIGNMENT:
            raise ArgumentError(
                f"record_bytes must be a multiple of {ALIGNMENT} up to {MAX_PAGE_BYTES}",
                given=self.record_bytes,
            )
        if (self.record % np.uint64(ALIGNMENT)).any() or not self.record.all():
            raise ArgumentError(f"a record's address must be a multiple of {ALIGNMENT}, and not 0")
        if self.first_block < 0:
            raise ArgumentError("a part of a record begins at a block >= 0", given=self.first_block)
        if self.length.min(initial=0) < 0 or self.length.max(initial=0) > self.record_bytes:
            raise ArgumentError("a piece is longer than its record, or shorter than 0 bytes")
        if self.length.sum(axis=1).max(initial=0) > self.record_bytes:
            raise ArgumentError(
                "the pieces of a page do not fit into its record", record_bytes=self.record_bytes
            )
        if (self.piece[self.length > 0] == 0).any():
            raise ArgumentError("a piece has address 0")

    def __len__(self) -> int:
        return len(self.record)

    def take(self, index: npt.NDArray[np.intp]) -> Records:
        """Some of the records."""
        return replace(self, record=self.record[index], piece=self.piece[index], length=self.length[index])


def _check_pieces(address: U64, length: I64) -> None:
    if address.dtype != np.uint64 or length.dtype != np.int64:
        raise ArgumentError("addresses must be uint64, lengths int64", given=(address.dtype, length.dtype))
    if address.ndim != 2 or address.shape[1] == 0 or length.shape != address.shape:
        raise ArgumentError(
            f"pieces and lengths must have one shape (n, k), k > 0, not {address.shape} and {length.shape}"
        )


class PageKernels(ABC):
    """Moves pages between records and pieces on one device, and sums them up for their checksums. Thread-safe.

    All work is queued, in the order of the calls, on a stream of our own that waits for no other unless `after` tells it to.
    No call waits for the work. The caller keeps records and pieces allocated until it is `done`, and does not touch them
    meanwhile. A failure of the driver is told by `Pending.sums`; arguments that do not fit raise ArgumentError at once.

    The sums are those of `gdsstore.checksum.host.raw_sums` of whole records, with their padding.
    """

    name: str

    def __init__(self, device: CudaDevice) -> None:
        """`device` is the caller's to close, after this. Raises DeviceError."""
        self._device = device
        self._stream = Stream(device)
        self._lock = threading.Lock()
        self._closed = False

    def gather(self, records: Records) -> Pending:
        """Copy the pieces into their records and zero the padding. The sums are of the records as written."""
        return self._submit(len(records), None, lambda pending: self._gather(pending, records))

    def scatter(self, records: Records, *, only: npt.NDArray[np.bool_] | None = None) -> Pending:
        """Copy the records into their pieces. The sums are of the records as read.

        `only`, shape (n,): the other records are not read and their pieces not written, and their sums are 0.
        """
        if only is None:
            return self._submit(len(records), None, lambda pending: self._scatter(pending, records))
        if only.dtype != np.bool_ or only.shape != (len(records),):
            raise ArgumentError(f"only must be bool of shape ({len(records)},)")
        chosen = np.flatnonzero(only)
        some = records.take(chosen)
        return self._submit(len(records), chosen, lambda pending: self._scatter(pending, some))

    def sums(self, address: U64, length: I64, first_block: I64) -> Pending:
        """Sum up n pages where they lie, each in k pieces. All arrays have shape (n, k).

        `address`: uint64, multiples of 16. `length`: int64, bytes, multiples of 4096 up to 1 GiB; 0 for no piece.
        `first_block`: int64, index in its record of the block with which a piece begins.
        """
        _check_pieces(address, length)
        if first_block.dtype != np.int64 or first_block.shape != address.shape:
            raise ArgumentError(f"first_block must be int64 of shape {address.shape}")
        bad = (length < 0) | (length % ALIGNMENT != 0) | (length > MAX_PAGE_BYTES) | (first_block < 0)
        bad |= (length > 0) & ((address == 0) | (address % np.uint64(VECTOR_BYTES) != 0))
        if bad.any():
            raise ArgumentError(
                f"what is summed up must begin at a multiple of {VECTOR_BYTES} bytes, be a multiple of {ALIGNMENT} bytes long "
                "and have a first block >= 0; gather other pages first",
                page=int(np.flatnonzero(bad.any(axis=1))[0]),
            )
        return self._submit(
            len(address), None, lambda pending: self._sum(pending, address, length, first_block)
        )

    def after(self, event: Event) -> None:
        """What is submitted from now on begins after `event`, a point in somebody else's stream. Raises DeviceError."""
        with self._lock:
            self._stream.wait_for(event)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Wait for what is queued, at most `timeout_s`, and free everything; whether that came to pass. Idempotent.

        Where it did not, nothing was freed that the device may still use, and a later call tries again.
        """
        if not self._device.usable:
            return True
        deadline = Deadline(timeout_s)
        with self._lock:
            self._closed = True
            left = under_way(self._stream)
            if not all(pending.wait(deadline.left_s) for pending in left):
                return False
            self._free()
            self._stream.close()
        return True

    def _submit(
        self, count: int, chosen: npt.NDArray[np.intp] | None, queue: Callable[[Pending], None]
    ) -> Pending:
        with self._lock:
            if self._closed:
                raise DeviceError("these kernels were closed", device=self._device.ordinal)
            under_way(self._stream)  # lets go of the memory of what has ended
            pending = Pending(self._stream, count, chosen)
            try:
                if count and (chosen is None or len(chosen)):
                    queue(pending)
            except GdsStoreError as error:
                pending.fail(error)
            except Exception as error:  # what was queued before it is under way
                log.exception("work on the device could not be queued")
                pending.fail(DeviceError(f"{type(error).__name__}: {error}", device=self._device.ordinal))
            finally:
                pending.seal()
        return pending

    @abstractmethod
    def _gather(self, pending: Pending, records: Records) -> None:
        """Queue it, n > 0. `pending` keeps the memory and gets the way to read the sums. Raises DeviceError, also half-way."""

    @abstractmethod
    def _scatter(self, pending: Pending, records: Records) -> None:
        """Likewise."""

    @abstractmethod
    def _sum(self, pending: Pending, address: U64, length: I64, first_block: I64) -> None:
        """Likewise."""

    @abstractmethod
    def _free(self) -> None:
        """Free what was allocated. Nothing is under way any more. Idempotent."""

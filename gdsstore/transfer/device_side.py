"""Pages in the memory of one device: gathered, scattered and checksummed there, through a device arena."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op
from gdsstore.engines.device import Registered
from gdsstore.errors import DeadlineError, DeviceError, EngineError
from gdsstore.layout import ALIGNMENT
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.memory.lease import Lease
from gdsstore.memory.streams import Stream
from gdsstore.memory.views import PageMemory
from gdsstore.transfer.flight import U64, Flight, Ints, Side, first_blocks
from gdsstore.transfer.results import Unfinished
from gdsstore.transfer.scatter import PageKernels, Pending, Records
from gdsstore.waiting import Deadline

# Below, a request a piece costs the drive more than the copy through staging costs the device.
IN_PLACE_BYTES = 128 << 10


class DeviceSide(Side):
    """`registered`: memory of the caller's that the drive reaches directly; pages in it are moved in place where their pieces
    are large and aligned. `uploads`: a stream of ours for copies from host memory; `queueing` guards it. The kernels queue on
    another one; nothing but our own work is ever on either."""

    def __init__(
        self,
        uploads: Stream,
        queueing: threading.Lock,
        arena: Callable[[], DeviceArena],
        kernels: Callable[[], PageKernels],
        registered: Registered,
    ) -> None:
        self._arena, self._make_kernels = arena, kernels
        self._registered = registered
        self._uploads = uploads
        self._queueing = queueing

    def in_place(self, memory: PageMemory, record_bytes: int) -> npt.NDArray[np.bool_]:
        large = (memory.length >= IN_PLACE_BYTES).all(axis=1) & (memory.page_bytes == record_bytes)
        if not large.any():
            return np.zeros(len(memory), np.bool_)
        known = self._registered.find(memory.address.ravel(), memory.length.ravel())[0]
        reached = known.reshape(memory.address.shape).all(axis=1)
        return np.asarray(large & reached & memory.direct(ALIGNMENT), np.bool_)

    def lease(self, nbytes: int, timeout_s: float) -> Lease:
        return self._arena().lease(nbytes, timeout_s)

    def prepare(self, flight: Flight, deadline: Deadline) -> None:
        in_place = len(flight.staged) < len(flight.memory)
        if flight.op is Op.WRITE or in_place:
            _until_ready(flight, deadline)
        if flight.op is Op.WRITE and flight.lease is not None:
            records = _records(flight, flight.staged)
            flight.sums = np.zeros(len(flight.memory), np.uint64)
            flight.sums[flight.staged] = self._run(flight, lambda kernels: kernels.gather(records), deadline)

    def raw_checksums(self, flight: Flight, pages: Ints, deadline: Deadline) -> U64:
        sums = np.zeros(len(flight.memory), np.uint64)
        staged = pages[np.isin(pages, flight.staged)]
        if flight.op is Op.WRITE and flight.sums is not None:
            sums[staged] = flight.sums[staged]
        elif len(staged):
            sums[staged] = self._scatter(flight, staged, deadline)
        in_place = pages[~np.isin(pages, flight.staged)]
        if len(in_place):
            address, length = flight.address[in_place], flight.length[in_place]
            first = first_blocks(length, ALIGNMENT) + flight.first_block
            sums[in_place] = self._run(flight, lambda kernels: kernels.sums(address, length, first), deadline)
        return sums[pages]

    def bring(
        self,
        address: U64,
        memory: PageMemory,
        record_bytes: int,
        deadline: Deadline,
        sums: U64 | None = None,
        first_block: int = 0,
    ) -> Unfinished | None:
        n = len(address)
        lease = self._arena().lease(n * record_bytes, deadline.left_s)
        under_way: list[Unfinished] = []
        try:
            _wait_ready(memory, deadline)
            staged = np.uint64(lease.address) + np.arange(n, dtype=np.uint64) * np.uint64(record_bytes)
            starts = np.flatnonzero(np.append(True, np.diff(address) != record_bytes))
            nbytes = np.diff(np.append(starts, n)) * record_bytes
            with self._turn(deadline):
                copies = Pending(self._uploads, 0)
                codes = self._uploads.copy_each(staged[starts], address[starts], nbytes)
                copies.seal()
                under_way.append(copies)
                if codes.any():
                    raise EngineError(
                        "host memory could not be copied to the device", cuda_error=int(codes.max())
                    )
                kernels = self._make_kernels()
                kernels.after(self._uploads.record())
                records = Records(staged, record_bytes, memory.address, memory.length, first_block)
                pending = kernels.scatter(records)
                under_way.append(pending)
            if not pending.wait(deadline.left_s):
                return pending
            arrived = pending.sums  # of the staged copies, which nobody else writes; raises where it failed
            if sums is not None:
                sums[:] = arrived
        except DeviceError as error:
            raise EngineError(f"work on the device failed: {error}") from error
        finally:
            if under_way:
                lease.quarantine(lambda: all(work.done for work in under_way))
            else:
                lease.release()
        return None

    def scatter(self, flight: Flight, pages: Ints, deadline: Deadline) -> None:
        staged = pages[np.isin(pages, flight.staged)]
        if len(staged) and not flight.scattered:
            self._scatter(flight, staged, deadline)

    def _scatter(self, flight: Flight, staged: Ints, deadline: Deadline) -> U64:
        """Wrong pages are scattered too, and found out by their checksums: one pass, and their memory is worth nothing anyway."""
        _until_ready(flight, deadline)
        records = _records(flight, staged)
        sums = self._run(flight, lambda kernels: kernels.scatter(records), deadline)
        flight.scattered = True
        return sums

    @contextlib.contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[None]:
        if not self._queueing.acquire(timeout=deadline.left_s):
            raise DeadlineError("the driver holds other work on the device up, and no time is left")
        try:
            if deadline.passed:  # the memory may be somebody else's by now
                raise DeadlineError("no time is left for work on the device")
            yield
        finally:
            self._queueing.release()

    def _run(self, flight: Flight, queue: Callable[[PageKernels], Pending], deadline: Deadline) -> U64:
        """Sums of what `queue` queues, once it has ended."""
        try:
            with self._turn(deadline):
                pending = queue(self._make_kernels())
            flight.device_work.append(pending)
            if not pending.wait(deadline.left_s):
                raise DeadlineError("the device did not do its work in time")
            return pending.sums
        except DeviceError as error:
            raise EngineError(f"work on the device failed: {error}") from error


def _until_ready(flight: Flight, deadline: Deadline) -> None:
    _wait_ready(flight.memory, deadline)


def _wait_ready(memory: PageMemory, deadline: Deadline) -> None:
    ready = memory.ready
    try:
        if ready is not None and not ready.wait(deadline.left_s):
            raise DeadlineError("the work that was under way on the pages did not end in time")
    except DeviceError as error:
        raise EngineError(f"the work that was under way on the pages failed: {error}") from error


def _records(flight: Flight, staged: Ints) -> Records:
    return Records(
        np.ascontiguousarray(flight.address[staged, 0]),
        flight.record_bytes,
        flight.memory.address[staged],
        flight.memory.length[staged],
        flight.first_block,
    )

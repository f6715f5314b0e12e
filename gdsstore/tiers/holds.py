"""What a caller has of the host cache for a while: records that it reads, or rows that it fills."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.tiers.core import Core
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import I32, I64, U8, U64, Mask, Origin, State
from gdsstore.tiers.shelf import Shelf


class Hold:
    """The records of one `get`, which nobody evicts or overwrites until `release`. A context manager that releases.

    Arrays of shape (n,), in the order of the keys; 0 where `found` is false. `raw`: the raw checksum sum of the whole record at
    `address`, as it was when the record came. `due`: records on trial of which this was the second use: `CachedNamespace.write`
    them to the drive. The bytes are not to be changed. For one thread.
    """

    __slots__ = ("_core", "_picked", "_shelf", "address", "due", "found", "payload_bytes", "raw")

    def __init__(self, core: Core, shelf: Shelf, picked: I32, due: Mask) -> None:
        """Of rows that were pinned for it; -1 for a miss."""
        self._core, self._shelf = core, shelf
        self._picked: I32 = picked[picked >= 0]
        self.found: Mask = picked >= 0
        self.due: Mask = due
        self.address: U64 = shelf.address_of(picked)
        self.raw: U64 = np.zeros(len(picked), np.uint64)
        self.raw[self.found] = shelf.rows["raw"][self._picked]
        self.payload_bytes: I64 = np.zeros(len(picked), np.int64)
        self.payload_bytes[self.found] = shelf.rows["payload_bytes"][self._picked]

    def __len__(self) -> int:
        return len(self.found)

    def release(self) -> None:
        """Let others have the memory. Idempotent."""
        if len(self._picked) == 0:
            return
        with self._core.lock:
            picked, self._picked = self._picked, np.empty(0, np.int32)
            self._let_go(picked)

    def _let_go(self, picked: I32) -> None:
        """With the lock held."""
        self._shelf.unpin(picked)
        self._core.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Loan(Hold):
    """Clean records that somebody outside this process reads, and whose bytes count until `release`, which any thread may call.

    `offset`: bytes from the beginning of the cache's memory, int64 (n,), 0 where not found.
    """

    __slots__ = ("_owner", "offset")

    def __init__(self, core: Core, shelf: Shelf, picked: I32, owner: str) -> None:
        """Of clean rows that were pinned, and counted in `core.lent`, for it; -1 for what is not lent."""
        self._owner = owner
        super().__init__(core, shelf, picked, np.zeros(len(picked), np.bool_))
        self.offset: I64 = np.where(self.found, self.address - np.uint64(core.address), 0).astype(np.int64)

    def keep(self, mask: Mask) -> None:
        """Release those records at once where `mask`, bool (n,), is false: they are not found any more. For one call: it
        counts those that stay as hits, and the others as misses."""
        staying = mask[self.found]
        with self._core.lock:
            picked, self._picked = self._picked, self._picked[staying]
            lent, tally = len(self._picked), self._core.tally
            tally.hits += lent
            tally.lent += lent
            tally.misses += len(picked) - lent
            self._shelf.rows["hit"][self._picked] = True
            self._let_go(picked[~staying])
        self.found &= mask
        self.offset[~mask] = 0

    def _let_go(self, picked: I32) -> None:
        lent = self._core.lent
        lent[self._owner] -= len(picked) * self._shelf.record_bytes
        if not lent[self._owner]:
            del lent[self._owner]
        super()._let_go(picked)


class Reservation:
    """Memory for new records, which nobody sees before `commit`. A context manager that aborts what was not committed.

    `room`: a `Room` value a key, in their order. `granted`: where it is GRANTED. `address`: of `record_bytes` bytes each, 0
    where not granted. Arrays of shape (n,). The caller fills whole records, zeros what pads a page, and verifies what it read.
    For one thread.
    """

    __slots__ = ("_core", "_origin", "_picked", "_shelf", "address", "granted", "record_bytes", "room")

    def __init__(self, core: Core, shelf: Shelf, room: U8, picked: I32, origin: Origin) -> None:
        """Of rows that were claimed for it; -1 where none was."""
        self._core, self._shelf, self._origin = core, shelf, origin
        self._picked = picked  # -1 once settled
        self.room = room
        self.granted: Mask = picked >= 0
        self.address: U64 = shelf.address_of(picked)
        self.record_bytes = shelf.record_bytes

    def __len__(self) -> int:
        return len(self.room)

    def commit(self, mask: Mask, raw: U64, standing: Standing = Standing.CLEAN) -> Mask:
        """Let readers see those granted records where `mask` is true; the others can be committed later.

        `mask`: shape (n,). `raw`: raw checksum sums, uint64 (n,), read where `mask` is true. Returns which are visible now: a
        record that was dropped meanwhile is not, nor any once the cache was closed. Raises ArgumentError for arrays that do
        not fit.
        """
        n = len(self.room)
        if mask.dtype != np.bool_ or mask.shape != (n,) or raw.dtype != np.uint64 or raw.shape != (n,):
            raise ArgumentError(f"a reservation of {n} keys needs bool[{n}] and uint64[{n}] to commit")
        at = np.flatnonzero(mask & (self._picked >= 0))
        picked = self._take(at)
        visible = np.zeros(n, np.bool_)
        with self._core.lock:
            core, shelf = self._core, self._shelf
            if not core.closed:
                visible[at] = shelf.publish(picked, raw[at], standing, core.stamp())
                core.tally.entered(self._origin, int(np.count_nonzero(visible)))
            self._give_back(picked[~visible[at]])
        return visible

    def abort(self) -> None:
        """Give back what was not committed. Nothing may write to it any more. Idempotent."""
        picked = self._take(np.flatnonzero(self._picked >= 0))
        if len(picked):
            with self._core.lock:
                self._give_back(picked)

    def quarantine(self, done: Callable[[], bool], mask: Mask | None = None) -> None:
        """Give back what was not committed, but let nobody have its memory until `done()` is true.

        For memory that the drive may still write to. `mask`: only of these keys, shape (n,). `done` must not block, is called
        by one thread at a time, and counts as false if it raises.
        """
        mine = self._picked >= 0
        picked = self._take(np.flatnonzero(mine if mask is None else mine & mask))
        with self._core.lock:
            self._doom(picked)
            self._core.quarantine(self._shelf, picked, done)
            self._core.changed.notify_all()

    def _take(self, at: npt.NDArray[np.intp]) -> I32:
        picked: I32 = self._picked[at]
        self._picked[at] = -1
        return picked

    # With the lock held:

    def _give_back(self, picked: I32) -> None:
        self._doom(picked)
        self._shelf.unpin(picked)
        self._core.changed.notify_all()

    def _doom(self, picked: I32) -> None:
        self._shelf.remove(picked[self._shelf.rows["state"][picked] == State.FILLING])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

"""Writing dirty records to the drive, outside the cache's lock, a batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gdsstore.namespace import KEY_BYTES
from gdsstore.tiers.core import Core
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import I32, I64, U8, U64, Mask, State
from gdsstore.tiers.shelf import Shelf
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.tiers")

BATCH_BYTES = 32 << 20  # more than one reservation needs, so that the next ones find clean records
MAX_TRIES = 2  # a record that could not be written this often, when its room was needed, is lost
STEPS_A_ROW = 4  # how far past clean records the search for dirty ones goes


@dataclass(frozen=True, slots=True)
class DirtyRecords:
    """Whole records, n of one namespace, to be written to the drive.

    `keys`: uint8 (n, 32); `address`: where each begins; `raw`: its raw checksum sum; arrays of shape (n,). What pads a page to
    `record_bytes` is zero.
    """

    namespace_digest: bytes
    keys: U8
    address: U64
    payload_bytes: I64
    raw: U64
    record_bytes: int


class Written(Protocol):
    """What became of them; a SaveResult is one."""

    @property
    def ok(self) -> Mask:
        """Which are on the drive now, shape (n,)."""

    @property
    def damaged(self) -> Mask:
        """Which are not any more what `DirtyRecords.raw` says, and so were not written. Shape (n,)."""

    @property
    def memory_in_use(self) -> bool:
        """Whether the drive may still read records that are not `ok`. Does not block."""


WriteBack: TypeAlias = Callable[[DirtyRecords, Deadline], Written]
"""Writes records, and returns by the deadline. Called without locks, by several threads at once. Must not use the cache."""


class _Piece(NamedTuple):
    """The rows of one namespace, and what is written of them."""

    picked: I32
    records: DirtyRecords


class _Outcome(NamedTuple):
    ok: Mask
    damaged: Mask
    in_use: Callable[[], bool]


class Writer:
    """Cleans dirty rows of a cache."""

    def __init__(self, core: Core, write_back: WriteBack, digests: list[bytes]) -> None:
        self._core, self._write_back = core, write_back
        self._digests = digests  # by namespace number; grows

    def write_coldest(self, shelf: Shelf, needed: I32, deadline: Deadline) -> bool:
        """Write the `needed` dirty rows, or a larger batch of the coldest. As `write`."""
        want = max(len(needed), BATCH_BYTES // shelf.record_bytes)
        batch = shelf.coldest_dirty(want, STEPS_A_ROW * want)
        # Colder ones may be in use, and so be written without making room.
        return self.write(shelf, batch if len(batch) > len(needed) else needed, needed, deadline)

    def write(self, shelf: Shelf, picked: I32, needed: I32, deadline: Deadline) -> bool:
        """Write dirty rows that nobody writes, all different. Called with the lock held, which it gives up meanwhile.

        Rows that were written are clean, damaged ones are gone; others stay dirty, or are lost where their room is `needed`, nobody
        has them, and they failed before when it was needed. Returns false where the drive took nothing.
        """
        if len(picked) == 0 or deadline.passed:
            return False
        fit = shelf.unwritten(picked)
        if len(fit) < len(
            picked
        ):  # a row that is being filled would be stored with bytes that are not the page of its key
            log.error("%d records that are not dirty were to be written: a bug", len(picked) - len(fit))
            picked = fit
        shelf.pin(picked)
        shelf.rows["writing"][picked] = True
        pieces = self._pieces(shelf, picked)
        outcomes: list[_Outcome] = []
        progress = False
        entry = (shelf, picked)
        self._core.writing.append(entry)
        self._core.lock.release()
        try:
            outcomes.extend(self._call(piece.records, deadline) for piece in pieces)
        finally:
            self._core.lock.acquire()
            self._core.writing = [each for each in self._core.writing if each is not entry]
            shelf.rows["writing"][picked] = False
            if deadline.passed:
                needed = needed[:0]  # nobody knows whether the drive would have taken more: no failure counts
            for number, piece in enumerate(pieces):
                outcome = outcomes[number] if number < len(outcomes) else _nothing(len(piece.picked))
                progress |= self._settle(shelf, piece.picked, outcome, needed)
            self._core.changed.notify_all()
        return progress

    def _pieces(self, shelf: Shelf, picked: I32) -> list[_Piece]:
        pieces = []
        namespaces = shelf.rows["namespace"][picked]
        for namespace in np.unique(namespaces).tolist():
            # Hottest first, which is prefix order: pages that are read together lie together.
            mine = picked[namespaces == namespace][::-1]
            at = shelf.rows[mine]
            records = DirtyRecords(
                self._digests[namespace],
                np.ascontiguousarray(at["key"]).view(np.uint8).reshape(-1, KEY_BYTES),
                shelf.address_of(mine),
                at["payload_bytes"].astype(np.int64),
                at["raw"].copy(),
                shelf.record_bytes,
            )
            pieces.append(_Piece(mine, records))
        return pieces

    def _call(self, records: DirtyRecords, deadline: Deadline) -> _Outcome:
        n = len(records.address)
        try:
            result = self._write_back(records, deadline)
            ok = np.asarray(result.ok, np.bool_).reshape(n)
            damaged = np.asarray(result.damaged, np.bool_).reshape(n)
            return _Outcome(ok, damaged, lambda: bool(result.memory_in_use))
        except Exception:  # whoever needs room is not the one to fail for another's records
            log.exception("%d dirty records could not be written", n)
            return _nothing(n)

    def _drop_damaged(self, shelf: Shelf, damaged: I32) -> None:
        """With the lock held: rows whose bytes are not what they were. Nobody is to read them, or to try again to write them."""
        gone = damaged[shelf.rows["state"][damaged] == State.READY]
        if len(gone):
            log.error(
                "%d records of the host cache had changed before they were written, and are dropped",
                len(gone),
            )
            self._core.tally.damaged += len(gone)
            self._core.tally.left_unused(shelf.rows[gone])
            shelf.remove(gone)

    def _settle(self, shelf: Shelf, picked: I32, outcome: _Outcome, needed: I32) -> bool:
        """With the lock held: what the rows are, now that their writer is back."""
        self._drop_damaged(shelf, picked[outcome.damaged])
        at = shelf.rows[picked]
        dirty: Mask = (at["state"] == State.READY) & (at["standing"] == Standing.DIRTY)
        written, failed = picked[dirty & outcome.ok], picked[dirty & ~outcome.ok]
        shelf.set_standing(written, Standing.CLEAN)
        tally = self._core.tally
        tally.written_back += len(written)
        tally.write_failures += len(failed)
        tries = shelf.rows["failed_writes"][failed] + np.isin(failed, needed)
        shelf.rows["failed_writes"][failed] = np.minimum(tries, MAX_TRIES)
        given_up = np.isin(failed, needed) & (tries >= MAX_TRIES) & (shelf.rows["pins"][failed] == 1)  # ours
        lost = failed[given_up]
        # Not the coldest any more: the next try comes late, when the drive may be well again.
        shelf.touch(failed[~given_up], self._core.stamp())
        if len(lost):
            log.error("%d dirty records were lost: the drive did not take them", len(lost))
            tally.dirty_lost += len(lost)
            tally.left_unused(shelf.rows[lost])
            shelf.remove(lost)
        if outcome.ok.all() or not outcome.in_use():
            shelf.unpin(picked)
        else:
            shelf.unpin(picked[outcome.ok])
            self._core.quarantine(shelf, picked[~outcome.ok], lambda: not outcome.in_use())
        return len(failed) < len(picked)  # those that were dropped make room too


def _nothing(n: int) -> _Outcome:
    none: npt.NDArray[np.bool_] = np.zeros(n, np.bool_)
    return _Outcome(none, none, lambda: False)

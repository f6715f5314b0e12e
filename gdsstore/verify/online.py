"""Verification of an open store, while other processes may use it.

A segment can be reclaimed, filled or emptied while it is being read. So nothing is reported on one look: what looks damaged is
looked at again inside the catalog's write transaction, where no page can be dropped and no segment be given away, and counts
only if the segment is still in the same use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.store import Store
from gdsstore.transfer.results import PageStatus, Statuses
from gdsstore.verify.agreement import CatalogPages, catalog_pages, disagreements
from gdsstore.verify.payloads import PayloadReader, payload_damage
from gdsstore.verify.repair import repair_pages, repair_segment
from gdsstore.verify.result import Damage, Kind, Verification
from gdsstore.verify.table import Table, read_table
from gdsstore.volume.volume import Volume
from gdsstore.waiting import pause

ATTEMPTS = 3
RECHECK_AFTER_S = 0.05  # an entry that somebody is just writing is whole by then

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), in bytes of segment files."""


@dataclass(frozen=True, slots=True)
class Look:
    """One segment at one moment. `table` is None where the segment as a whole is damaged (then that is in `damage`)."""

    row: SegmentRow | None
    table: Table | None
    pages: CatalogPages
    damage: list[Damage]

    @property
    def use(self) -> tuple[object, ...]:
        """Equal for two looks at a segment that was not given away in between."""
        row = (
            None
            if self.row is None
            else (self.row.generation, self.row.volume, self.row.state is SegmentState.FREE)
        )
        return row, None if self.table is None else self.table.superblock.generation

    @property
    def live(self) -> npt.NDArray[np.int64]:
        """Slots whose payload can be checked: entries of pages, less those that are damaged themselves."""
        if self.table is None:
            return np.zeros(0, np.int64)
        live = self.table.live.copy()
        bad = [damage.slot for damage in self.damage if damage.slot is not None and damage.slot < len(live)]
        live[bad] = False
        return np.flatnonzero(live)


def verify_online(
    store: Store,
    reader: PayloadReader,
    *,
    repair: bool = False,
    progress: Progress = lambda done, total: None,
    first: int = 0,
    enter: Callable[[int], None] = lambda segment_id: None,
) -> Verification:
    """Check every segment of an open store; with `repair`, drop what is damaged.

    `first`: the segment to begin with; those before it come last. `enter` is called with each segment before it is read.
    Raises StoreError where the catalog fails, DeadlineError where the drive holds on to all memory.
    """
    return _Online(store, reader, repair, progress, enter).run(first)


class _Online:
    def __init__(
        self,
        store: Store,
        reader: PayloadReader,
        repair: bool,
        progress: Progress,
        enter: Callable[[int], None],
    ) -> None:
        self._store, self._reader, self._repair = store, reader, repair
        self._progress, self._enter = progress, enter
        self._result = Verification(online=True)
        self._newly_lost = _lost_at_open(store)

    def run(self, first: int) -> Verification:
        store, result = self._store, self._result
        started = time.monotonic()
        result.damaged += _gone_at_open(store)
        work = sorted(
            self._segments(), key=lambda item: item[0] < first
        )  # stable: those in front go to the end
        total = len(work) * store.segment_bytes
        for number, (segment_id, volume) in enumerate(work):
            done = number * store.segment_bytes
            self._enter(segment_id)
            self._progress(done, total)
            self._segment(segment_id, volume, partial(self._advance, done, total))
        self._progress(total, total)
        result.seconds = time.monotonic() - started
        return result

    def _advance(self, done: int, total: int, offset: int) -> None:
        self._progress(done + offset, total)

    def _segments(self) -> list[tuple[int, Volume]]:
        """All that lie on the volumes or that the catalog knows. A number on the wrong volume is a stranger's file."""
        store = self._store
        files = [(segment_id, volume) for volume in store.volumes for segment_id in volume.segment_ids()]
        with store.catalog.read() as txn:
            rows = {row.segment_id: store.volumes[row.volume] for row in store.catalog.segments(txn)}
        for segment_id, volume in files:
            if rows.setdefault(segment_id, volume) is not volume:
                what = f"the catalog has this segment on volume {rows[segment_id].path}"
                file = str(volume.segment_path(segment_id))
                self._result.left_out.append(Damage(file, segment_id, Kind.FOREIGN, what))
        return sorted(rows.items(), key=lambda item: item[0])

    def _segment(self, segment_id: int, volume: Volume, advance: Callable[[int], None]) -> None:
        catalog = self._store.catalog
        for _ in range(ATTEMPTS):
            with catalog.read() as txn:
                first = self._look(txn, segment_id, volume)
            if first is None:
                return
            slots = first.live
            status = self._payloads(first, volume, slots, advance)
            wrong = status != PageStatus.LOADED
            if not first.damage and not wrong.any():
                self._count(first, slots)
                return
            if first.table is None:
                self._newly_lost.add(segment_id)  # another process may find out before us, and give it up
            pause(RECHECK_AFTER_S)
            # Read once more before it is called damaged: an error on the way is not one on the drive.
            again = self._payloads(first, volume, slots[wrong], lambda offset: None)
            with catalog.write(pages=len(first.pages) if self._repair else 0) as txn:
                now = self._look(txn, segment_id, volume)
                if now is None or now.use != first.use:
                    continue
                damage = [*now.damage, *_still_wrong(now, slots[wrong], again)]
                if self._repair and damage:
                    damage = self._mend(txn, now, segment_id, volume, damage)
            self._count(now, slots)
            self._result.damaged += damage
            return
        self._result.reclaimed += 1

    def _look(self, txn: Any, segment_id: int, volume: Volume) -> Look | None:
        """None where there is nothing to check: the segment is gone, being made, or was given up earlier."""
        store = self._store
        row = store.catalog.segment(txn, segment_id)
        # Before the table: a page is in the table first, so every page of this list must be there.
        pages = catalog_pages(store.catalog, txn, segment_id)
        table = read_table(volume, segment_id, store.uuid, store.segment_bytes)
        if isinstance(table, Damage):
            if table.kind is Kind.MISSING and (row is None or row.state is SegmentState.LOST):
                return None
            if row is not None and row.state is SegmentState.LOST:
                self._lost(table)
                return None
            return Look(row, None, pages, [replace(table, pages=len(pages))])
        if row is None or row.state is SegmentState.LOST:
            return None  # whole, and not the catalog's: it is just being made, or the next one to open alone takes it in
        if row.generation != table.superblock.generation:
            if row.state is SegmentState.FREE:
                return None  # being formatted for its next use, now or when a process was killed
            what = "the superblock is of another use of the segment than the catalog's"
            return Look(
                row, None, pages, [Damage(table.file, segment_id, Kind.SUPERBLOCK, what, pages=len(pages))]
            )
        return Look(row, table, pages, disagreements(table, pages, segment_id))

    def _lost(self, damage: Damage) -> None:
        """Given up by the catalog. New only if that happened while this store was opened or verified."""
        if any(damage.file == each.file for each in (*self._result.damaged, *self._result.left_out)):
            return
        if damage.segment in self._newly_lost:
            self._result.damaged.append(replace(damage, repaired=True))
        else:
            self._result.left_out.append(damage)

    def _payloads(
        self, look: Look, volume: Volume, slots: npt.NDArray[np.int64], advance: Callable[[int], None]
    ) -> Statuses:
        if look.table is None or len(slots) == 0:
            return np.zeros(0, np.uint8)
        return self._reader.check(look.table, volume, slots, advance)

    def _count(self, look: Look, slots: npt.NDArray[np.int64]) -> None:
        result = self._result
        result.segments += 1
        if look.table is not None:
            result.pages_checked += len(slots)
            result.bytes_checked += len(slots) * look.table.superblock.geometry.slot_bytes
            result.leftovers += int(np.count_nonzero(~np.isin(slots, look.pages.slot)))

    def _mend(
        self, txn: Any, now: Look, segment_id: int, volume: Volume, damage: list[Damage]
    ) -> list[Damage]:
        store = self._store
        if now.table is None:
            return repair_segment(store.catalog, txn, segment_id, volume, damage)
        filled = 0 if now.row is None else now.row.filled
        return repair_pages(store.catalog, txn, volume, now.table, now.pages, filled, damage)


def _still_wrong(now: Look, slots: npt.NDArray[np.int64], status: Statuses) -> list[Damage]:
    """Of the slots whose payload was wrong twice, those that still hold a page."""
    if now.table is None:
        return []
    still = np.isin(slots, now.live) & (status != PageStatus.LOADED)
    visible = np.isin(slots, now.pages.slot)
    found = []
    for at in np.flatnonzero(still).tolist():  # few: each is damage
        slot = int(slots[at])
        one = payload_damage(now.table, slot, PageStatus(status[at]))
        found.append(replace(one, pages=int(visible[at])))
    return found


def _lost_at_open(store: Store) -> set[int]:
    """Segments that the opening of this store gave up, just now."""
    return {
        segment_id
        for outcome in (store.opened.recovered, store.opened.reconciled)
        if outcome is not None
        for segment_id in outcome.left_out
    }


def _gone_at_open(store: Store) -> list[Damage]:
    """Segments whose files were missing when this store was opened: the catalog has forgotten them since."""
    reconciled = store.opened.reconciled
    if reconciled is None:
        return []
    return [
        Damage(
            str(store.volumes[row.volume].segment_path(row.segment_id)),
            row.segment_id,
            Kind.MISSING,
            "the file is missing; opening the store dropped its pages",
            pages=pages,
            repaired=True,
        )
        for row, pages in reconciled.gone
    ]

"""Finding room for new records: free regions first, then the coldest records, wherever they are."""

from __future__ import annotations

import numpy as np

from gdsstore.tiers.core import Core
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import I32
from gdsstore.tiers.shelf import Shelf, Wanted
from gdsstore.tiers.writing import Writer
from gdsstore.waiting import Deadline

_CANDIDATES = 8  # of the coldest regions: how many to look at for one without pins
_NO_RECORD = np.iinfo(np.int64).max


def make_room(core: Core, writer: Writer, shelf: Shelf, wanted: Wanted, deadline: Deadline) -> None:
    """Free rows on the shelf for those keys that are not there, as many as can be had. Called with the lock held.

    Gives the lock up while dirty records are written, which is the only wait; after the deadline only clean ones make room, and
    also once the drive took nothing of a batch: the caller then learns at once that there is no room.
    """
    if shelf.per_region == 0:
        return
    regions = True  # of other shelves may be taken
    while True:
        missing = int(np.count_nonzero(shelf.find(wanted) < 0))
        short = min(missing, len(shelf.rows)) - shelf.free_count
        if short <= 0:
            return
        if core.add_free_region(shelf) or core.sweep():
            continue
        victims = shelf.coldest(short)
        own_stamp = int(shelf.rows["stamp"][victims[0]]) if len(victims) else _NO_RECORD
        colder = _colder_region(core, shelf, own_stamp) if regions else None
        if colder is not None:
            # Whether it could be had or not: the lock was given up meanwhile, and the victims may be somebody else's rows by now.
            regions = _take_region(core, writer, shelf, *colder, deadline)
            continue
        dirty = shelf.rows["standing"][victims] == Standing.DIRTY
        if not dirty.all():
            core.evict(shelf, victims[~dirty])
        elif len(victims) and writer.write_coldest(shelf, victims, deadline):
            continue
        elif core.writing and not deadline.passed:  # what another call writes may be room for this one
            core.changed.wait(deadline.left_s)
        else:
            return


def _colder_region(core: Core, shelf: Shelf, stamp: int) -> tuple[Shelf, int] | None:
    """The coldest region of another shelf of which all records are colder than `stamp`, and none is pinned.

    So a region changes its record size only where a strict order of use over all sizes would evict all that it holds.
    """
    others = [other for other in core.shelves.values() if other is not shelf]
    found: list[tuple[int, Shelf, int]] = []
    for other in others:
        regions, stamps = other.region_stamps()
        for at in np.argsort(stamps, kind="stable")[:_CANDIDATES].tolist():
            if int(stamps[at]) < stamp:
                found.append((int(stamps[at]), other, int(regions[at])))
    for _, other, region in sorted(found, key=lambda candidate: candidate[0]):
        # A filling row has a pin; so has a doomed one.
        if not other.rows["pins"][other.region_rows(region)].any():
            return other, region
    return None


def _take_region(
    core: Core, writer: Writer, shelf: Shelf, other: Shelf, region: int, deadline: Deadline
) -> bool:
    """One step towards having the region; false where the drive does not take what is in it, or there is no time."""
    held: I32 = other.region_rows(region)
    dirty = other.unwritten(held)
    if len(dirty):  # they are evicted in the next round, if still as cold
        return writer.write(other, dirty, dirty, deadline)
    core.evict(other, held)
    core.move_region(region, other, shelf)
    return True

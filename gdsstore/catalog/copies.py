"""Which of several copies of a page a rebuild takes.

Two processes may save the same page at the same time. Where the power went while the second one did, its entry may be on the drive
and its payload not, and the first one's page, which was acknowledged as durable, must not be lost by that. So of the copies that
could have been under way the newest one that is whole counts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.keys import U64
from gdsstore.errors import VolumeError
from gdsstore.volume.format import ENTRY, Entries
from gdsstore.volume.volume import Volume, write_entries

log = logging.getLogger("gdsstore.catalog")

UNSYNCED_NS = 2 * 3600 * 10**9
"""An entry that is older than the newest one by this was synced: `sync_interval_s` and the deadlines are shorter."""

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Arrived = Callable[[Entries], Mask]
"""Which of n entries, in segment and slot order, have no payload of that checksum: only those count as not arrived, shape (n,)."""


def choose(
    entries: Entries, index: U64, live: Mask, arrived: Arrived, now_ns: int | None = None
) -> tuple[I64, I64]:
    """Positions of the entries that stand for their pages, by rising `index`, and of those whose payload did not arrive.

    `index`, `live`: of the entries, shape (n,). Entries that are not live take part: a deleted page must not come back through an
    older copy. `arrived` is asked only about copies that have an older one to fall back to, once each. What was written later
    than `now_ns`, nanoseconds, had a wrong clock and says nothing of when the last entry was written; None: the clock's time.
    """
    if len(entries) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    sequence = entries["sequence"]
    order = np.lexsort((sequence, index))
    last = np.append(index[order][1:] != index[order][:-1], True)
    at = np.flatnonzero(last)  # in `order`: the copy of each page that counts, so far
    first = np.append(0, at[:-1] + 1)
    now_ns = time.time_ns() if now_ns is None else now_ns
    newest = int(sequence[live & (sequence <= now_ns)].max(initial=0))
    recent = sequence > max(0, newest - UNSYNCED_NS)
    lost: list[I64] = []
    unsure = np.arange(len(at))
    while True:
        unsure = unsure[at[unsure] > first[unsure]]
        unsure = unsure[(live & recent)[order[at[unsure]]] & live[order[at[unsure] - 1]]]
        if len(unsure) == 0:
            break
        asked = np.sort(order[at[unsure]])
        gone = asked[~arrived(entries[asked])]
        lost.append(gone)
        unsure = unsure[np.isin(order[at[unsure]], gone)]
        at[unsure] -= 1
    chosen = order[at]
    return chosen[live[chosen]], np.concatenate([np.empty(0, np.int64), *lost])


def forget(volumes: Sequence[Volume], volume_of: dict[int, int], entries: Entries) -> None:
    """Clear the entries of copies whose payload did not arrive, or the next rebuild would take them for synced ones.

    `volume_of`: the volume of each segment. Does not raise: a drive that cannot be written to is heard of soon enough.
    """
    for segment_id in np.unique(entries["segment_id"]).tolist():
        slots = np.sort(entries["slot"][entries["segment_id"] == segment_id]).astype(np.int64)
        log.warning(
            "segment %08d.seg: %d copies of pages were being written when the machine went down; older ones are used",
            segment_id,
            len(slots),
        )
        try:
            with volumes[volume_of[segment_id]].table(segment_id) as fd:
                for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
                    write_entries(fd, int(run[0]), np.zeros(len(run), ENTRY))
                os.fdatasync(fd)
        except VolumeError as error:
            log.error("they could not be cleared from its record table: %s", error)

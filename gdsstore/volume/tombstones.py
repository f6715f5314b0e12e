"""Marking table entries as deleted, so that a rebuild does not bring their pages back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gdsstore.volume.format import FLAG_DELETED, Geometry, entry_salt, intact, seal_entries
from gdsstore.volume.volume import Volume, read_entries, write_entries


def bury(
    volume: Volume,
    segment_id: int,
    geometry: Geometry,
    generation: int,
    slots: npt.NDArray[np.uint32],
    store_uuid: bytes,
    sequence: int,
) -> None:
    """Flag the entries of these slots as deleted, if they still are of `generation`. Raises VolumeError.

    Call it inside the catalog's write transaction, with the generation checked there: nobody can give the segment away then.
    """
    salt = entry_salt(store_uuid)
    with volume.table(segment_id) as fd:
        table = read_entries(fd, geometry).copy()
        slots = slots[slots < len(table)]
        mine = table[slots]
        keep = intact(mine, salt) & (mine["generation"] == generation)
        slots, mine = slots[keep], mine[keep]
        mine["flags"] |= FLAG_DELETED
        mine["sequence"] = np.maximum(mine["sequence"], sequence)  # the clock may have gone back
        seal_entries(mine, salt)
        order = np.argsort(slots)
        slots, mine = slots[order], mine[order]
        # One write a run of neighbours: other processes may be writing entries in between.
        for part in np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots.astype(np.int64)) != 1) + 1):
            if len(part):
                write_entries(fd, int(slots[part[0]]), mine[part])

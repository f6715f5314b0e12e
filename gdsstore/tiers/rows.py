"""What the host cache knows of each record: one row a slot, in a structured array that compiled kernels walk."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Rows: TypeAlias = npt.NDArray[Any]  # of ROW


# The machine code of kernels.py, which numba keeps on disk, holds the values of these enums: with one of them, change it too.


class State(IntEnum):
    FREE = 0
    FILLING = 1  # in the index, invisible to readers; its one pin is the reservation's
    READY = 2  # in the index and in the order of use
    DOOMED = 3  # in neither: free once its last pin goes


class Origin(IntEnum):
    """What brought a record into the cache."""

    PREFETCH = 0
    LOAD = 1
    SAVE = 2


class Room(IntEnum):
    """What a reservation could do for a key."""

    GRANTED = 0
    PRESENT = 1  # its record is there already
    FILLING = 2  # another reservation, or an earlier key of this one, is about to bring it
    NO_ROOM = 3


ROW = np.dtype(
    [
        ("key", np.uint64, (4,)),
        ("hash", np.uint64),  # catalog.keys' index: the namespace is mixed in
        ("raw", np.uint64),  # raw checksum sum of the whole record
        ("stamp", np.int64),  # number of the call that used it last
        ("older", np.int32),  # neighbours in the order of use; -1: none
        ("newer", np.int32),
        ("pins", np.int32),
        ("namespace", np.int32),
        ("payload_bytes", np.int32),
        ("state", np.uint8),
        ("standing", np.uint8),
        ("origin", np.uint8),
        ("hit", np.bool_),
        ("writing", np.bool_),
        ("failed_writes", np.uint8),
    ],
    align=True,
)

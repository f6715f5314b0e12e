"""The catalog's values, and what a look-up returns. Private to the catalog: it can always be rebuilt from the segments."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

CATALOG_VERSION = 1

PAGE = np.dtype([("tag", "<u8"), ("segment", "<u4"), ("slot", "<u4"), ("first", "<u4")])
"""Value of a page: where it lies, and the first slot of the extent that describes it."""

EXTENT_PAGES = 60  # 32 + 60 x 32 bytes: about the largest value that LMDB keeps inside a leaf of 4 KiB
EXTENT_HEADER = np.dtype([("namespace", "u1", 16), ("generation", "<u8"), ("pages", "<u4"), ("dead", "<u4")])
IDENT = np.dtype([("index", "<u8"), ("tag", "<u8")])
ITEM = np.dtype([("checksum", "<u8"), ("payload_bytes", "<u4"), ("live", "<u4")])


@dataclass(frozen=True, slots=True)
class Extent:
    """Up to 60 pages of one namespace in consecutive slots, written together.

    What belongs to one prefix is looked up together, and one extent answers for all of it: as a value it is the header, then
    the pages' idents, then their items, so that a run of keys is compared with one comparison of bytes.
    """

    namespace: bytes
    generation: int
    idents: npt.NDArray[np.void]  # IDENT, (n,)
    items: npt.NDArray[np.void]  # ITEM, (n,)

    @classmethod
    def decode(cls, value: bytes | bytearray) -> Extent:
        """Views of `value`; of a bytearray they can be written."""
        header = np.frombuffer(value, EXTENT_HEADER, 1)[0]
        pages = int(header["pages"])
        start = EXTENT_HEADER.itemsize
        idents = np.frombuffer(value, IDENT, pages, start)
        items = np.frombuffer(value, ITEM, pages, start + pages * IDENT.itemsize)
        return cls(header["namespace"].tobytes(), int(header["generation"]), idents, items)

    @staticmethod
    def encode(
        namespace: bytes, generation: int, idents: npt.NDArray[np.void], items: npt.NDArray[np.void]
    ) -> bytes:
        header = np.zeros(1, EXTENT_HEADER)
        header["namespace"], header["generation"] = np.frombuffer(namespace, np.uint8), generation
        header["pages"], header["dead"] = len(idents), np.count_nonzero(items["live"] == 0)
        return header.tobytes() + idents.tobytes() + items.tobytes()


SEGMENT = np.dtype(
    [
        ("volume", "<u2"),
        ("state", "<u2"),
        ("slot_count", "<u4"),
        ("slot_bytes", "<u8"),
        ("generation", "<u8"),
        ("filled", "<u4"),
        ("reserved", "<u4"),
    ]
)

_SEGMENT_ROW = struct.Struct("<HHIQQII")  # the same: a tenth of what numpy takes for a single row
assert _SEGMENT_ROW.size == SEGMENT.itemsize

VALUE_SIZES = {
    "pages": (PAGE.itemsize,),
    "segments": (SEGMENT.itemsize,),
    "extents": tuple(
        EXTENT_HEADER.itemsize + n * (IDENT.itemsize + ITEM.itemsize) for n in range(1, EXTENT_PAGES + 1)
    ),
}
"""For each of the catalog's databases the bytes that a value may have."""


class SegmentState(IntEnum):
    FREE = 0  # formatted once, holds nothing; may be given any slot size
    OPEN = 1  # being filled, or left partly filled by a writer that is gone
    SEALED = 2  # full
    LOST = 3  # missing, damaged or of another store: never written to again


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """What the catalog knows of one segment."""

    segment_id: int
    volume: int
    state: SegmentState
    slot_bytes: int
    slot_count: int
    generation: int
    filled: int

    def encode(self) -> bytes:
        row = np.zeros(1, SEGMENT)
        row["volume"], row["state"], row["slot_count"] = self.volume, self.state, self.slot_count
        row["slot_bytes"], row["generation"], row["filled"] = self.slot_bytes, self.generation, self.filled
        return row.tobytes()

    @classmethod
    def decode(cls, segment_id: int, raw: bytes) -> SegmentRow:
        volume, state, slot_count, slot_bytes, generation, filled, _ = _SEGMENT_ROW.unpack(raw)
        return cls(segment_id, volume, SegmentState(state), slot_bytes, slot_count, generation, filled)

    def with_(self, **changes: object) -> SegmentRow:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Locations:
    """Where pages lie; arrays of shape (n,), in the order of the keys. Only `found` holds for pages that are not there."""

    found: npt.NDArray[np.bool_]
    segment: npt.NDArray[np.uint32]
    slot: npt.NDArray[np.uint32]
    generation: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]
    payload_bytes: npt.NDArray[np.uint32]

    @classmethod
    def none(cls, n: int) -> Locations:
        return cls(
            np.zeros(n, np.bool_),
            np.zeros(n, np.uint32),
            np.zeros(n, np.uint32),
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint32),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Pages of one namespace in consecutive slots of one segment: what a writer commits. Arrays of shape (n,)."""

    segment: int
    first: int
    generation: int
    index: npt.NDArray[np.uint64]
    tag: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]
    payload_bytes: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.index)

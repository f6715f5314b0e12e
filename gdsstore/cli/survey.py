"""What a store holds, gathered in one walk over the catalog: segments with fill and heat, namespaces, the hottest pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.heat import TICKS_PER_S
from gdsstore.catalog.reclaim import coldness
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.errors import GdsStoreError
from gdsstore.store import Store
from gdsstore.verify.agreement import CatalogPages, catalog_pages
from gdsstore.volume.format import Geometry, entry_salt, intact
from gdsstore.volume.volume import read_entries

NEVER_S = (1 << 32) / TICKS_PER_S  # the age of a slot that was never used


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment. Ages are seconds since the last use, None for never."""

    segment: int
    file: str
    volume: int
    state: str
    slot_bytes: int
    slots: int
    filled: int  # slots that were written; dropped pages leave theirs behind
    pages: int
    age_s: float | None  # what reclaim goes by: the coldest of the hottest quarter of its slots
    youngest_s: float | None  # of its hottest page


@dataclass(frozen=True, slots=True)
class HotPage:
    """A page and where it lies. `key` is None where the segment's table does not tell it (any more)."""

    key: str | None
    namespace: str
    file: str
    slot: int
    payload_bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """The pages of one namespace, and what its digest stands for (None where its description is lost)."""

    namespace: str
    pages: int
    payload_bytes: int
    describes: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """`direct` says whether pages go past the page cache."""

    path: str
    free_bytes: int
    total_bytes: int
    segments: int
    segment_file_bytes: int
    direct: bool
    memory_alignment: int


@dataclass(frozen=True, slots=True)
class Survey:
    """All of it; plain values by `to_dict`."""

    store: dict[str, Any]
    volumes: list[VolumeInfo]
    states: dict[str, dict[str, Any]]
    namespaces: list[NamespaceInfo]
    hottest: list[HotPage]
    segments: list[SegmentInfo]

    def to_dict(self, *, with_segments: bool) -> dict[str, Any]:
        found = asdict(self)
        if not with_segments:
            del found["segments"]
        return found


@dataclass(frozen=True, slots=True)
class _Warm:
    """The hottest pages of one segment, hottest first; arrays of shape (n,)."""

    row: SegmentRow
    age_s: npt.NDArray[np.float64]
    slot: npt.NDArray[np.int64]
    payload_bytes: npt.NDArray[np.uint32]
    namespace: npt.NDArray[np.uint8]


def survey(store: Store, keys: int) -> Survey:
    """Look at everything that the catalog and the heat file tell. `keys`: how many of the hottest pages to name.

    The store may be in use: segments are looked at one after the other, so that the sums are of no one moment.
    """
    with store.catalog.read() as txn:
        rows = store.catalog.segments(txn)
    segments: list[SegmentInfo] = []
    warm: list[_Warm] = []
    pages_of: Counter[bytes] = Counter()
    bytes_of: Counter[bytes] = Counter()
    for row in rows:
        with store.catalog.read() as txn:
            pages = catalog_pages(store.catalog, txn, row.segment_id)
        ages = store.heat.ages(row.segment_id, row.slot_count)
        pages = _inside(pages, row)
        segments.append(_segment(store, row, pages, ages))
        if len(pages):
            warm.append(_warm(row, pages, ages, keys))
            packed = np.ascontiguousarray(pages.namespace).view("V16").reshape(-1)
            digests, which = np.unique(packed, return_inverse=True)
            counts = np.bincount(which, minlength=len(digests)).tolist()
            sizes = np.bincount(which, pages.payload_bytes, len(digests)).tolist()
            for digest, count, size in zip(digests, counts, sizes, strict=True):
                pages_of[digest.tobytes()] += count
                bytes_of[digest.tobytes()] += int(size)
    return Survey(
        _store(store, sum(pages_of.values())),
        _volumes(store),
        _states(segments),
        _namespaces(store, pages_of, bytes_of),
        _hottest(store, warm, keys),
        segments,
    )


def _inside(pages: CatalogPages, row: SegmentRow) -> CatalogPages:
    """Without those that were saved after the row was read, or make no sense."""
    at = pages.slot < row.slot_count
    return CatalogPages(
        pages.slot[at],
        pages.index[at],
        pages.tag[at],
        pages.checksum[at],
        pages.payload_bytes[at],
        pages.generation[at],
        pages.namespace[at],
    )


def _segment(
    store: Store, row: SegmentRow, pages: CatalogPages, ages: npt.NDArray[np.float64]
) -> SegmentInfo:
    holds = row.state in (SegmentState.OPEN, SegmentState.SEALED)
    return SegmentInfo(
        row.segment_id,
        str(store.volumes[row.volume].segment_path(row.segment_id)),
        row.volume,
        row.state.name.lower(),
        row.slot_bytes,
        row.slot_count,
        row.filled,
        len(pages),
        _age(coldness(ages[: row.filled])) if holds else None,
        _age(float(ages[pages.slot].min())) if len(pages) else None,
    )


def _age(seconds: float) -> float | None:
    return seconds if seconds < NEVER_S else None


def _warm(row: SegmentRow, pages: CatalogPages, ages: npt.NDArray[np.float64], keys: int) -> _Warm:
    age = ages[pages.slot]
    first = np.argsort(age, kind="stable")[:keys]
    return _Warm(row, age[first], pages.slot[first], pages.payload_bytes[first], pages.namespace[first])


def _hottest(store: Store, warm: list[_Warm], keys: int) -> list[HotPage]:
    ranked = sorted(
        ((float(age), number, at) for number, each in enumerate(warm) for at, age in enumerate(each.age_s)),
    )[:keys]
    found = []
    for age, number, at in ranked:
        each = warm[number]
        slot = int(each.slot[at])
        file = str(store.volumes[each.row.volume].segment_path(each.row.segment_id))
        key = _key(store, each.row, slot)
        namespace = each.namespace[at].tobytes().hex()
        found.append(HotPage(key, namespace, file, slot, int(each.payload_bytes[at]), age))
    return found


def _key(store: Store, row: SegmentRow, slot: int) -> str | None:
    try:
        with store.volumes[row.volume].table(row.segment_id) as fd:
            entry = read_entries(fd, Geometry.of(store.segment_bytes, row.slot_bytes), slot, 1)
    except GdsStoreError:
        return None
    if (
        len(entry) == 0
        or not intact(entry, entry_salt(store.uuid))[0]
        or entry["generation"][0] != row.generation
    ):
        return None
    return bytes(entry["key"][0].tobytes()).hex()


def _store(store: Store, pages: int) -> dict[str, Any]:
    stats = store.stats()
    return {
        "path": str(store.directory.root),
        "uuid": store.uuid.hex(),
        "opened": store.opened.why,
        "capacity_bytes": stats["capacity_bytes"],
        "physical_bytes": stats["physical_bytes"],
        "segment_bytes": stats["segment_bytes"],
        "catalog_bytes": store.catalog.physical_bytes,
        "heat_bytes": store.heat.used_bytes,
        "pages": pages,
    }


def _volumes(store: Store) -> list[VolumeInfo]:
    found = []
    for volume in store.volumes:
        files, space, direct = volume.segment_ids(), volume.space(), volume.direct
        found.append(
            VolumeInfo(
                str(volume.path),
                space.free_bytes,
                space.total_bytes,
                len(files),
                sum(files.values()),
                direct.direct,
                direct.memory_alignment,
            )
        )
    return found


def _states(segments: list[SegmentInfo]) -> dict[str, dict[str, Any]]:
    """For each state: how many segments, how full, and the spread of their ages (seconds)."""
    found: dict[str, dict[str, Any]] = {}
    for state in SegmentState:
        mine = [each for each in segments if each.state == state.name.lower()]
        slots, ages = (
            sum(each.slots for each in mine),
            [each.age_s for each in mine if each.age_s is not None],
        )
        holds = state in (SegmentState.OPEN, SegmentState.SEALED)
        found[state.name.lower()] = {
            "segments": len(mine),
            "pages": sum(each.pages for each in mine),
            "fill": sum(each.filled for each in mine) / slots if holds and slots else None,
            "hottest_age_s": min(ages, default=None),
            "coldest_age_s": max(ages, default=None),
        }
    return found


def _namespaces(store: Store, pages: Counter[bytes], sizes: Counter[bytes]) -> list[NamespaceInfo]:
    described = store.directory.namespaces()
    digests = sorted({*pages, *described}, key=lambda digest: (-pages[digest], digest))
    return [
        NamespaceInfo(digest.hex(), pages[digest], sizes[digest], described.get(digest)) for digest in digests
    ]

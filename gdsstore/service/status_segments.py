"""What lies in a store's segments, learnt a little at a time: a look at everything would take seconds on a large store."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdsstore.catalog.heat import TICKS_PER_S
from gdsstore.catalog.reclaim import coldness
from gdsstore.catalog.records import EXTENT_HEADER, SegmentRow, SegmentState
from gdsstore.store import Store

CELLS = 384  # of the grid: as many segments, or groups of them
NAMESPACES = 100  # that are told one by one; the largest
DESCRIBE_EVERY_S = 10.0
NEVER_S = (1 << 32) / TICKS_PER_S
HOLDS = (SegmentState.OPEN, SegmentState.SEALED)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was found in a segment. `age_s`: as reclaim sees it; None for never used."""

    row: SegmentRow
    pages: dict[bytes, int]  # live pages by namespace digest
    age_s: float | None


class SegmentSurvey:
    """Fill, heat and namespaces of the segments. Used by one thread at a time.

    Each `look` goes through some of the segments, those first that changed, then those not seen for longest.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: Sequence[SegmentRow] = ()
        self._seen: OrderedDict[int, _Seen] = OrderedDict()  # not seen for longest: first
        self._described: dict[bytes, dict[str, Any]] = {}
        self._described_at = -DESCRIBE_EVERY_S

    def look(self, budget_s: float) -> None:
        """Learn more, for about `budget_s` seconds. Raises StoreError where the catalog cannot be read."""
        store, until = self._store, time.monotonic() + budget_s
        with store.catalog.read() as txn:
            self._rows = store.catalog.segments(txn)
        rows = {row.segment_id: row for row in self._rows}
        for segment_id in self._seen.keys() - rows.keys():
            del self._seen[segment_id]
        for segment_id in self._due(rows):
            self._seen[segment_id] = self._look_into(rows[segment_id])
            self._seen.move_to_end(segment_id)
            if time.monotonic() >= until:
                break
        if time.monotonic() - self._described_at >= DESCRIBE_EVERY_S:
            self._described_at = time.monotonic()
            self._described = store.directory.namespaces()

    def _due(self, rows: dict[int, SegmentRow]) -> Iterator[int]:
        seen = self._seen
        changed = [number for number, row in rows.items() if number not in seen or seen[number].row != row]
        yield from changed
        again = set(changed)
        yield from [number for number in seen if number not in again]

    def _look_into(self, row: SegmentRow) -> _Seen:
        if row.state not in HOLDS:
            return _Seen(row, {}, None)
        store, size = self._store, EXTENT_HEADER.itemsize
        with store.catalog.read() as txn:
            raw = b"".join(value[:size] for _, value in store.catalog.extents(txn, row.segment_id))
        headers = np.frombuffer(raw, EXTENT_HEADER)
        digests, which = np.unique(headers["namespace"].copy().view("V16").reshape(-1), return_inverse=True)
        live = np.bincount(which.reshape(-1), headers["pages"] - headers["dead"], len(digests))
        pages = {digest.tobytes(): int(count) for digest, count in zip(digests, live, strict=True) if count}
        age = coldness(store.heat.ages(row.segment_id, row.filled))
        return _Seen(row, pages, age if age < NEVER_S else None)

    # --- as plain values ---

    def states(self) -> dict[str, int]:
        """How many segments are in each state."""
        counts = Counter(row.state for row in self._rows)
        return {state.name.lower(): counts[state] for state in SegmentState}

    def document(self) -> dict[str, Any]:
        """Namespaces, and the segments as columns: one entry a cell, which is `a_cell` segments in the order of their ids.

        `state`: that of most of the cell's segments. `fill`: written slots / slots; `pages`: live ones; `age_s`: seconds since
        the cell was last used as reclaim sees it, None for never; `namespace`: index of the one with most pages, -1 for none.
        """
        pages, nbytes = self._totals()
        known = sorted({*pages, *self._described}, key=lambda digest: (-nbytes[digest], digest))
        order = {digest: number for number, digest in enumerate(known[:NAMESPACES])}
        a_cell = max(1, -(-len(self._rows) // CELLS))
        groups = [self._rows[first : first + a_cell] for first in range(0, len(self._rows), a_cell)]
        cells = [self._cell(group, order) for group in groups]
        names = ("first", "state", "fill", "pages", "age_s", "namespace")
        return {
            "segments": {
                "count": len(self._rows),
                "seen": len(self._seen),
                "states": self.states(),
                "a_cell": a_cell,
                "cells": {name: [cell[name] for cell in cells] for name in names},
            },
            "namespaces": {
                "count": len(known),
                "rows": [
                    {
                        "namespace": digest.hex(),
                        "name": _name(self._described.get(digest)),
                        "pages": pages[digest],
                        "bytes": nbytes[digest],
                    }
                    for digest in order
                ],
            },
        }

    def _cell(self, group: Sequence[SegmentRow], order: dict[bytes, int]) -> dict[str, Any]:
        state = Counter(row.state for row in group).most_common(1)[0][0]
        slots = sum(row.slot_count for row in group if row.state in HOLDS)
        filled = sum(row.filled for row in group if row.state in HOLDS)
        pages: Counter[bytes] = Counter()
        ages = []
        for seen in (self._seen[row.segment_id] for row in group if row.segment_id in self._seen):
            pages.update(seen.pages)
            if seen.age_s is not None:
                ages.append(seen.age_s)
        main = max(pages, key=lambda digest: pages[digest], default=b"")
        return {
            "first": group[0].segment_id,
            "state": state.name.lower(),
            "fill": round(filled / slots, 3) if slots else 0.0,
            "pages": pages.total(),
            "age_s": round(min(ages), 1) if ages else None,
            "namespace": order.get(main, -1),
        }

    def _totals(self) -> tuple[Counter[bytes], Counter[bytes]]:
        """Pages, and bytes on the drives, of each namespace."""
        pages: Counter[bytes] = Counter()
        nbytes: Counter[bytes] = Counter()
        for seen in self._seen.values():
            for digest, count in seen.pages.items():
                pages[digest] += count
                nbytes[digest] += count * seen.row.slot_bytes
        return pages, nbytes


def _name(described: dict[str, Any] | None) -> str:
    """A namespace for people: its model and weights, its pool where that says something, its ranks where it has some."""
    if described is None:
        return "description lost"
    parts = [str(described.get("model", "?"))]
    if described.get("weights"):
        parts.append(str(described["weights"])[:12])
    if described.get("pool", "kv") != "kv":
        parts.append(str(described["pool"]))
    parallelism = described.get("parallelism")
    if isinstance(parallelism, dict):
        parts += [
            f"{axis} {parallelism.get(f'{axis}_rank')}/{parallelism[f'{axis}_size']}"
            for axis in ("tp", "pp", "cp", "dcp")
            if parallelism.get(f"{axis}_size", 1) != 1
        ]
    return " · ".join(parts)

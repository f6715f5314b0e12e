"""The state of an open store and its daemon as one JSON document: what `/api/status`, the live page and `gdsstore top` show."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gdsstore.engines.base import Op
from gdsstore.errors import VolumeError
from gdsstore.service.errors_ring import ErrorRing
from gdsstore.service.shared import Shared
from gdsstore.service.status_moved import latencies, queues, throughput
from gdsstore.service.status_segments import SegmentSurvey
from gdsstore.service.status_tiers import lookups, outcomes, tiers
from gdsstore.store import Store
from gdsstore.volume.health import Breaker, HealthSnapshot
from gdsstore.volume.volume import Space, Volume

if TYPE_CHECKING:  # it needs msgspec, and `top` looks at a store without a daemon too
    from gdsstore.service.node_totals import NodeTotals

VERSION = 1
FIRST_LOOK_S = 0.3
LOOK_S = 0.03

Facts = Callable[[], Mapping[str, Any]]
"""What the daemon says of itself: `pid`, `uptime_s`, `version`, `clients`, `leases`, `draining`, ... Plain values, no secrets."""


class StatusBoard:
    """The status of one store for all who ask: made at most once a second, outside the event loop. Thread-safe."""

    def __init__(
        self,
        store: Store,
        facts: Facts | None = None,
        errors: ErrorRing | None = None,
        node: NodeTotals | None = None,
    ) -> None:
        """`node`: what other processes did; None: this one is asked about only."""
        self._store, self._facts, self._errors, self._node = store, facts, errors, node
        self._survey = SegmentSurvey(store)
        self._look_s = FIRST_LOOK_S
        self._shared = Shared(self._make)

    async def latest(self) -> dict[str, Any]:
        """The document. Raises DeadlineError, StoreClosedError, StoreError, VolumeError."""
        return await self._shared.latest()

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """As `latest`, for callers without an event loop."""
        return self._shared.wait(timeout_s)

    def _make(self) -> dict[str, Any]:
        facts = None if self._facts is None else self._facts()
        with self._store.using():  # nothing of it may be closed meanwhile
            self._survey.look(self._look_s)
            self._look_s = LOOK_S
            return _document(self._store, facts, self._survey, self._errors, self._node)


def collect(store: Store, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document for a single look. It tells of every segment only where that takes no longer than a look may.

    Raises StoreClosedError, StoreError, VolumeError.
    """
    with store.using():
        survey = SegmentSurvey(store)
        survey.look(FIRST_LOOK_S)
        return _document(store, facts, survey, None, None)


def ready(store: Store, facts: Mapping[str, Any] | None) -> str:
    """Why the daemon should get no work now; "" where it should. Never blocks. Raises StoreClosedError."""
    with store.using():
        if facts is not None and facts.get("draining"):
            return "the daemon is draining"
        health = store.health
        if not any(
            all(health[op][i].breaker is Breaker.CLOSED for op in Op) for i in range(len(store.volumes))
        ):
            return "no volume of the store answers"
        return ""


def _document(
    store: Store,
    facts: Mapping[str, Any] | None,
    survey: SegmentSurvey,
    errors: ErrorRing | None,
    node: NodeTotals | None,
) -> dict[str, Any]:
    stats = store.stats()
    catalog = stats["catalog"]
    own = store.activity()
    whole = own if node is None else node.with_own(own)
    moved, volumes = whole.moved, [str(volume.path) for volume in store.volumes]
    share = {"read_bytes": own.moved.bytes_of("read"), "written_bytes": own.moved.bytes_of("write")}
    return {
        "version": VERSION,
        "time_s": time.time(),
        "clock_s": time.monotonic(),  # of the counters: rates are differences of these
        "daemon": None if facts is None else {**facts, **share},
        "clients": [] if node is None else node.clients(),
        "store": {
            "path": str(store.directory.root),
            "uuid": store.uuid.hex(),
            "capacity_bytes": stats["capacity_bytes"],
            "physical_bytes": stats["physical_bytes"],
            "segment_bytes": stats["segment_bytes"],
            "pages": catalog["pages"],
            "catalog_bytes": catalog["used_bytes"],
            "readers": catalog["readers"],
            "engine": stats["engine"],
            "maintainer": stats["maintainer"],
            "segments_reclaimed": moved.count("segments_reclaimed"),
            "pages_reclaimed": moved.count("pages_reclaimed"),
        },
        "throughput": throughput(moved, volumes),
        "lookups": lookups(moved),
        "pages": outcomes(moved),
        "tiers": tiers(moved),
        "latencies": latencies(moved, volumes),
        "queues": queues(whole),
        "drives": [_drive(store, volume) for volume in store.volumes],
        **survey.document(),
        "host_cache": stats["host_cache"],
        "errors": [] if errors is None else errors.entries(),
    }


def _drive(store: Store, volume: Volume) -> dict[str, Any]:
    """One volume. `health` sums up both directions: sick (not used), slow (avoided by saves) or healthy."""
    found = {op: store.health[op][volume.index].snapshot() for op in Op}
    space: Space | None = None
    with contextlib.suppress(VolumeError):  # it may be unmounted: which is what the status is there to show
        space = volume.space()
    return {
        "path": str(volume.path),
        "health": _health(list(found.values()), there=space is not None),
        "free_bytes": None if space is None else space.free_bytes,
        "total_bytes": None if space is None else space.total_bytes,
        **{op.value: asdict(snapshot) for op, snapshot in found.items()},
    }


def _health(snapshots: list[HealthSnapshot], *, there: bool) -> str:
    if not there or any(each.breaker is not Breaker.CLOSED for each in snapshots):
        return "sick"
    return "slow" if any(each.slow for each in snapshots) else "healthy"

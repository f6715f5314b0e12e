"""What a store says of itself, as plain values; docs/api.md has the names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.engines.base import Op
from gdsstore.observe.activity import (
    CALLS,
    HOST_MISSES,
    SHARED_MISSES,
    Activity,
    IoKey,
    Moved,
    Numbers,
    Queue,
    TimesKey,
)
from gdsstore.observe.histogram import HistogramStats
from gdsstore.transfer.results import PageStatus
from gdsstore.transfer.scheduler import Scheduler
from gdsstore.volume.volume import Volume

if TYPE_CHECKING:
    from gdsstore.store_core import StoreCore

PAGE_COUNTERS: Final = frozenset(
    {f"pages_{status.name.lower()}" for status in PageStatus}
    | {"pages_loaded_from_host", "pages_loaded_from_shared", "shared_pages_refused"}
    | {"lookup_hits", "lookup_misses", "segments_reclaimed", "pages_reclaimed", HOST_MISSES, SHARED_MISSES}
)
"""What `Moved.pages` may have."""


def stats_of(
    store: StoreCore, rows: Sequence[SegmentRow], engine: str | None, scheduler: Scheduler
) -> dict[str, Any]:
    """See `Store.stats`. `rows`: the store's segments; `engine`: the name of what moves host memory."""
    reclaimed, times = store.reclaimer.counts, scheduler.times
    return {
        **store.counters.snapshot(),
        "capacity_bytes": store.capacity_bytes,
        "physical_bytes": len(rows) * store.segment_bytes
        + store.heat.used_bytes
        + store.catalog.physical_bytes,
        "segment_bytes": store.segment_bytes,
        "segments": _by_state(rows),
        "segments_reclaimed": reclaimed.segments,
        "pages_reclaimed": reclaimed.pages,
        "bytes_reclaimed": reclaimed.nbytes,
        "catalog": store.catalog.stats(),
        "engine": engine,
        "transfers": asdict(scheduler.stats()),
        "latency": {
            "wait": {name: asdict(histogram) for name, histogram in times.waited().items()},
            "run": {name: asdict(histogram) for name, histogram in times.ran().items()},
        },
        "drives": [
            _drive(store, volume, [row for row in rows if row.volume == volume.index])
            for volume in store.volumes
        ],
        "host_cache": store.cache.stats(),
        "maintainer": store.upkeep.is_maintainer,
    }


def activity_of(store: StoreCore, scheduler: Scheduler) -> Activity:
    """See `Store.activity`."""
    index = {str(volume.path): volume.index for volume in store.volumes}
    io: dict[IoKey, Numbers] = {
        (row.path, row.engine, index[row.volume], row.direction, row.cls): (row.nbytes, row.operations)
        for row in store.io_report()
    }
    reclaimed = store.reclaimer.counts
    counted = store.counters.snapshot()
    counted |= {"segments_reclaimed": reclaimed.segments, "pages_reclaimed": reclaimed.pages}
    pages: dict[str, Numbers] = {name: (counted[name],) for name in PAGE_COUNTERS & counted.keys()}
    cache, classes = store.cache.stats(), scheduler.stats().classes
    if cache is not None:
        pages[SHARED_MISSES if store.config.share_host_cache else HOST_MISSES] = (cache["misses"],)
    times: dict[TimesKey, Numbers] = {
        ("chunk", op.value, volume): _numbers(store.counters.chunk_times(op, volume))
        for volume in index.values()
        for op in Op
    }
    for what, histograms in (("wait", scheduler.times.waited()), ("run", scheduler.times.ran())):
        times |= {(what, cls, None): _numbers(histogram) for cls, histogram in histograms.items()}
    calls = {cls: tuple(getattr(counts, name) for name in CALLS) for cls, counts in classes.items()}
    queues = {cls: Queue(counts.waiting, counts.running, counts.oldest_s) for cls, counts in classes.items()}
    return Activity(Moved(io, pages, times, calls), queues, time.monotonic() - store.counters.since)


def _numbers(histogram: HistogramStats) -> Numbers:
    return *histogram.counts, histogram.sum_s


def _drive(store: StoreCore, volume: Volume, rows: Sequence[SegmentRow]) -> dict[str, Any]:
    return {
        "path": str(volume.path),
        "segments": _by_state(rows),
        "filled_bytes": sum(row.filled * row.slot_bytes for row in rows),
        "latency": {op.value: asdict(store.counters.chunk_times(op, volume.index)) for op in Op},
        **{op.value: asdict(store.health[op][volume.index].snapshot()) for op in Op},
    }


def _by_state(rows: Sequence[SegmentRow]) -> dict[str, int]:
    return {state.name.lower(): sum(row.state is state for row in rows) for state in SegmentState}

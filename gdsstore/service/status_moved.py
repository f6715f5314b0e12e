"""What moved, and how fast, as the status tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gdsstore.observe.activity import CALLS, Activity, Moved
from gdsstore.observe.histogram import BOUNDS_S


def throughput(moved: Moved, volumes: Sequence[str]) -> list[dict[str, Any]]:
    """Bytes by path, engine, volume and direction. `volumes`: the directory of each."""
    totals: Counter[tuple[str, str, int, str]] = Counter()
    for (path, engine, volume, direction, _), (nbytes, _) in moved.io.items():
        totals[path, engine, volume, direction] += int(nbytes)
    return [
        {
            "path": path,
            "engine": engine,
            "volume": volumes[volume],
            "direction": direction,
            "bytes": nbytes,
        }
        for (path, engine, volume, direction), nbytes in sorted(totals.items())
    ]


def latencies(moved: Moved, volumes: Sequence[str]) -> dict[str, Any]:
    """How long things took, as counts by bucket since the start (see HistogramStats). `what`: the I/O of a `chunk`, `of` reads or
    writes of a volume; the `wait` and the `run` of calls, `of` a class."""
    rows = [
        {
            "what": what,
            "of": of,
            "volume": None if volume is None else volumes[volume],
            "counts": list(counts),
            "sum_s": sum_s,
        }
        for (what, of, volume), (*counts, sum_s) in moved.times.items()
    ]
    return {"bounds_s": list(BOUNDS_S), "rows": rows}


def queues(activity: Activity) -> list[dict[str, Any]]:
    """By class: the calls that wait and run now, and what became of the others."""
    return [
        {"class": cls, **queue._asdict(), **dict(zip(CALLS, activity.moved.calls[cls], strict=True))}
        for cls, queue in activity.queues.items()
    ]

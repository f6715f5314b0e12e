"""What a client reports, checked before it is believed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path
from gdsstore.node import messages
from gdsstore.node.messages import Refusal
from gdsstore.observe.activity import BUCKETS, CALLS, Activity, IoKey, Moved, Numbers, Queue, TimesKey
from gdsstore.service.refused import RefusedError
from gdsstore.store_stats import PAGE_COUNTERS
from gdsstore.transfer.policy_terms import TransferClass

DIRECTIONS: Final = frozenset(op.value for op in Op)
CLASSES: Final = frozenset(cls.name.lower() for cls in TransferClass)
PATHS: Final = frozenset(path.value for path in Path)
OF: Final = {"chunk": DIRECTIONS, "wait": CLASSES, "run": CLASSES}


def checked(report: messages.Report, volumes: int) -> Activity:
    """A report about a store of so many volumes. Raises RefusedError for one that says what no process can say."""
    _printable(report.process)
    io: dict[IoKey, Numbers] = {}
    for row in report.io:
        _known(row.path, PATHS)
        _printable(row.engine)
        _known(row.volume, range(volumes))
        _known(row.direction, DIRECTIONS)
        _known(row.cls, CLASSES)
        io[row.path, row.engine, row.volume, row.direction, row.cls] = row.nbytes, row.operations
    for name in report.pages:
        _known(name, PAGE_COUNTERS)
    times: dict[TimesKey, Numbers] = {}
    for histogram in report.times:
        _known(histogram.what, OF)
        _known(histogram.of, OF[histogram.what])
        _known(histogram.volume, range(volumes) if histogram.what == "chunk" else (None,))
        _known(len(histogram.counts), (BUCKETS,))
        times[histogram.what, histogram.of, histogram.volume] = *histogram.counts, histogram.sum_s
    queues, calls = {}, {}
    for each in report.calls:
        _known(each.cls, CLASSES)
        _known(len(each.ended), (len(CALLS),))
        queues[each.cls] = Queue(each.waiting, each.running, each.oldest_s)
        calls[each.cls] = tuple(each.ended)
    pages = {name: (count,) for name, count in report.pages.items()}
    return Activity(Moved(io, pages, times, calls), queues, report.age_s)


def _known(value: object, known: Collection[object]) -> None:
    if value not in known:
        raise RefusedError(Refusal.ARGUMENT, f"a report says {value!r}, which this daemon does not know")


def _printable(text: str) -> None:
    """It goes to terminals."""
    if not text.isprintable():
        raise RefusedError(Refusal.ARGUMENT, "a report has a name that cannot be shown")

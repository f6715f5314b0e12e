"""A store's metrics for Prometheus. docs/metrics.md lists them; needs the extra `service`.

A process that has a server of its own registers a StoreCollector with it; `render` is the text for one that has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import gdsstore
from gdsstore.errors import MissingExtraError, StoreClosedError
from gdsstore.observe.activity import NodeShare
from gdsstore.observe.families import Family, Look, MetricKind
from gdsstore.observe.families_moving import MOVING
from gdsstore.observe.families_node import NODE
from gdsstore.observe.families_state import STATE

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("prometheus-client", "service", "metrics") from error

if TYPE_CHECKING:
    from prometheus_client import Metric

    from gdsstore.store import Store

SECTIONS: Final = (*MOVING, *STATE, *NODE)
FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family for section in SECTIONS for family in section.families
}
OF_NODE: Final = {family.name for section in NODE for family in section.families}
"""Of these, the ones that only the daemon has."""
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Of what `render` returns."""


class StoreCollector(Collector):
    """The metrics of one open store, for `prometheus_client`'s registries. Thread-safe.

    Each scrape takes `Store.stats()`. A registry holds one store: a second one's metrics would have the same names.
    """

    def __init__(self, store: Store, others: Callable[[], NodeShare] | None = None) -> None:
        """`others`: what other processes did with the store, for the metrics of the node; None: these are left out."""
        self._store, self._others = store, others
        self._families = [
            family for family in FAMILIES.values() if others is not None or family.name not in OF_NODE
        ]

    def describe(self) -> Iterable[Metric]:
        """Names only: what a registry asks for before the first scrape."""
        return [_metric(family, ()) for family in self._families]

    def collect(self) -> Iterable[Metric]:
        """Nothing once the store is closed: others have metrics in the registry too. Raises StoreError where the catalog cannot be
        read."""
        try:
            others = None if self._others is None else self._others()
            look = Look.at(self._store, gdsstore.__version__, others)
        except StoreClosedError:
            return []
        return [_metric(family, family.read(look)) for family in self._families]


def render(store: Store, others: Callable[[], NodeShare] | None = None) -> bytes:
    """The metrics of a store in Prometheus' text format; none once it is closed. `others`: see StoreCollector.

    Raises StoreError.
    """
    return generate_latest(StoreCollector(store, others))


def _metric(family: Family, samples: Iterable[tuple[tuple[str, ...], Any]]) -> Metric:
    if family.kind is MetricKind.HISTOGRAM:
        times = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, found in samples:
            bounds = [*map(repr, found["bounds_s"]), "+Inf"]
            buckets = list(zip(bounds, accumulate(found["counts"]), strict=True))
            times.add_metric(labels, buckets, found["sum_s"])
        return times
    kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric

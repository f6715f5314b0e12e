"""What a metric is: one row of the table that both the collector and docs/metrics.md are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from gdsstore.errors import VolumeError
from gdsstore.observe.activity import Moved, NodeShare
from gdsstore.observe.paths import IoRow
from gdsstore.volume.volume import Space, Volume

if TYPE_CHECKING:
    from gdsstore.store import Store


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Look:
    """A store at one moment. `spaces`: of each volume's filesystem; None where it cannot be told. `node`: what all processes of
    the node did, where this one is the daemon; else nothing."""

    path: str
    version: str
    stats: Mapping[str, Any]
    io: list[IoRow]
    spaces: list[Space | None]
    node: NodeShare

    @classmethod
    def at(cls, store: Store, version: str, others: NodeShare | None) -> Look:
        """`others`: what other processes did. Raises StoreClosedError, StoreError."""
        with store.using():
            spaces = [_space(volume) for volume in store.volumes]
            node = NodeShare(Moved(), 0)
            if others is not None:
                node = NodeShare(others.moved.plus(store.activity().moved), others.clients)
            return cls(str(store.directory.root), version, store.stats(), store.io_report(), spaces, node)

    def count(self, name: str) -> int:
        """A counter of `Store.stats`, which are missing where they never counted."""
        value: int = self.stats.get(name, 0)
        return value

    @property
    def classes(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """The scheduler's counts of each class, by its name."""
        found: Mapping[str, Mapping[str, Any]] = self.stats["transfers"]["classes"]
        return found.items()

    @property
    def drives(self) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
        """Directory, `stats()["drives"]` and `stats()["transfers"]["volumes"]` of each volume."""
        both = zip(self.stats["drives"], self.stats["transfers"]["volumes"], strict=True)
        return [(drive["path"], drive, transfers) for drive, transfers in both]


Samples: TypeAlias = Iterable[tuple[tuple[str, ...], Any]]
"""The values of a metric's labels, and a number; for a histogram a HistogramStats as a dictionary."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. `source`: where its numbers come from; `read` takes them from there."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    source: str
    read: Callable[[Look], Samples]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    families: tuple[Family, ...]


def counter(name: str, help_: str, source: str, read: Callable[[Look], Samples], *labels: str) -> Family:
    return Family(name, MetricKind.COUNTER, labels, help_, source, read)


def gauge(name: str, help_: str, source: str, read: Callable[[Look], Samples], *labels: str) -> Family:
    return Family(name, MetricKind.GAUGE, labels, help_, source, read)


def histogram(name: str, help_: str, source: str, read: Callable[[Look], Samples], *labels: str) -> Family:
    return Family(name, MetricKind.HISTOGRAM, labels, help_, source, read)


def one(value: Callable[[Look], float]) -> Callable[[Look], Samples]:
    """The samples of a metric without labels."""
    return lambda look: [((), value(look))]


def _space(volume: Volume) -> Space | None:
    try:
        return volume.space()
    except VolumeError:  # unmounted under us: the others are still worth telling of
        return None

"""What a process did with a store, as plain numbers that can be added up: what it tells the daemon of its node."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, TypeVar

from gdsstore.observe.histogram import BOUNDS_S

BUCKETS: Final = len(BOUNDS_S) + 1
CALLS: Final = ("started", "joined", "done", "cancelled", "dropped", "expired", "refused")
"""What became of calls."""
HOST_MISSES: Final = "host_misses"
"""Pages that a process's own host cache was asked for and did not have."""
SHARED_MISSES: Final = "shared_misses"
"""The same of the daemon's host cache, which is there for others."""
MOST: Final = (1 << 63) - 1  # where a sum stops: beyond it, messages could not carry it

Numbers: TypeAlias = tuple[float, ...]
IoKey: TypeAlias = tuple[str, str, int, str, str]
TimesKey: TypeAlias = tuple[str, str, int | None]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Moved:
    """Counters, which only rise. Volumes are named by their index, which is the same in all processes.

    `io`: bytes and operations by path, engine, volume, direction and class. `pages`: one number by the name of a counter of
    `Store.stats`, or one of the above. `times`: counts by bucket of BOUNDS_S, then the sum of the seconds; of a `chunk`'s I/O by
    direction and volume, of the `wait` and the `run` of calls by class, without a volume. `calls`: by class, in the order of CALLS.
    """

    io: Mapping[IoKey, Numbers] = field(default_factory=dict)
    pages: Mapping[str, Numbers] = field(default_factory=dict)
    times: Mapping[TimesKey, Numbers] = field(default_factory=dict)
    calls: Mapping[str, Numbers] = field(default_factory=dict)

    def plus(self, other: Moved) -> Moved:
        """The sum of both. A number stops at MOST."""
        return Moved(
            _sums(self.io, other.io),
            _sums(self.pages, other.pages),
            _sums(self.times, other.times),
            _sums(self.calls, other.calls),
        )

    def since(self, earlier: Moved) -> Moved:
        """What came after `earlier`. Where numbers fell, they began anew."""
        return Moved(
            _differences(self.io, earlier.io),
            _differences(self.pages, earlier.pages),
            _differences(self.times, earlier.times),
            _differences(self.calls, earlier.calls),
        )

    def bytes_of(self, direction: str) -> int:
        """All bytes that were "read" or written ("write")."""
        return int(sum(numbers[0] for key, numbers in self.io.items() if key[3] == direction))

    def count(self, name: str) -> int:
        """A number of `pages`; 0 where it never counted."""
        return int(self.pages.get(name, (0,))[0])

    @property
    def rows(self) -> int:
        return len(self.io) + len(self.pages) + len(self.times) + len(self.calls)


class Queue(NamedTuple):
    """Calls of one class now. `oldest_s`: how long the oldest of those that wait has waited, in seconds."""

    waiting: int
    running: int
    oldest_s: float

    def plus(self, other: Queue) -> Queue:
        return Queue(
            self.waiting + other.waiting, self.running + other.running, max(self.oldest_s, other.oldest_s)
        )


@dataclass(frozen=True, slots=True)
class Activity:
    """A process at one moment. `queues`: by class. `age_s`: for how many seconds it has been counting."""

    moved: Moved
    queues: Mapping[str, Queue]
    age_s: float


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What other processes than the daemon moved since it was started, and how many of them tell it now."""

    moved: Moved
    clients: int


def _sums(table: Mapping[K, Numbers], more: Mapping[K, Numbers]) -> dict[K, Numbers]:
    found = dict(table)
    for key, numbers in more.items():
        before = found.get(key)
        found[key] = numbers if before is None else tuple(map(_sum, before, numbers))
    return found


def _sum(one: float, other: float) -> float:
    return min(one + other, MOST)


def _differences(now: Mapping[K, Numbers], earlier: Mapping[K, Numbers]) -> dict[K, Numbers]:
    found = {}
    for key, numbers in now.items():
        before = earlier.get(key)
        anew = before is None or any(map(operator.lt, numbers, before))
        found[key] = numbers if before is None or anew else tuple(map(operator.sub, numbers, before))
    return found

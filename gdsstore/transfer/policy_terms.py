"""The words of the transfer policy: classes, states, requests, asks, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from gdsstore.engines.base import Op
from gdsstore.errors import ArgumentError


class TransferClass(IntEnum):
    """What a transfer is for. Smaller goes first."""

    LOAD = 0  # somebody waits for it now
    PREFETCH = 1  # needed by its deadline
    OFFLOAD = 2  # background; worth less the longer it waits
    MAINTENANCE = 3


class State(StrEnum):
    """Where a request is. From DONE on it has ended, and stays so."""

    QUEUED = "queued"
    RUNNING = "running"
    JOINED = "joined"  # shares the flight of another request for the same keys
    DONE = "done"  # its work, or the one that it had joined, returned or raised
    CANCELLED = "cancelled"
    DROPPED = "dropped"  # an offload that waited longer than its budget
    EXPIRED = "expired"  # its deadline passed before it was started
    REFUSED = "refused"  # the queue of its class was full


ENDED: Final = frozenset({State.DONE, State.CANCELLED, State.DROPPED, State.EXPIRED, State.REFUSED})


class AskState(StrEnum):
    """Where a chunk's ask for its share of the volumes is."""

    WAITING = "waiting"
    GRANTED = "granted"
    LATE = "late"  # its I/O ran into its deadline, but the engine has not let go of it
    ENDED = "ended"


class Cost(NamedTuple):
    """What a chunk takes of one volume while it is under way."""

    nbytes: int
    ops: int


Caps = Cost
"""What all chunks together may take of one volume."""

Units = Mapping[int, Cost]
"""A chunk's costs, by volume index."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs and waits.

    `workers`: requests that run at the same time. A class leaves one of them to each class above it, so that a load finds a
    worker whatever the others do; with a single worker nothing can be left. `queued`: requests of one class that wait, joined
    ones too. `offload_budget_s`: how long an offload is worth keeping. `turn`: how often something that waits is passed over by
    what goes before it, until it has a turn all the same.
    """

    workers: int = 4
    queued: int = 1024
    offload_budget_s: float = 10.0
    turn: int = 16

    def __post_init__(self) -> None:
        if min(self.workers, self.queued, self.turn) < 1:
            raise ArgumentError(
                "workers, queued and turn must be at least 1",
                workers=self.workers,
                queued=self.queued,
                turn=self.turn,
            )
        if not self.offload_budget_s > 0:
            raise ArgumentError("offload_budget_s must be above 0", offload_budget_s=self.offload_budget_s)

    def lanes(self, cls: TransferClass) -> int:
        """How many requests of this class and the ones below it may run at the same time."""
        return max(1, self.workers - cls)


@dataclass(slots=True, eq=False)
class Request:
    """One call. Made and changed by the policy only. Times are seconds on the clock of the policy's caller."""

    cls: TransferClass
    op: Op
    nbytes: int
    deadline: float
    keys: frozenset[object]
    number: int  # order of arrival
    since: float
    state: State = State.QUEUED
    stop: bool = False  # cancelled while it ran: its work shall end early
    urgency: tuple[int, float] = (
        0,
        0.0,
    )  # minus the priority, deadline: the least of it and of those who joined it
    entered: TransferClass = field(init=False)  # the class that it came in, and is counted under
    lane: TransferClass = field(init=False)  # the class that it was started in
    leader: Request | None = None  # whom it joined
    joined: list[Request] = field(default_factory=list)
    behind: int = 0  # keys for which an earlier request is in line
    tag: float = -1.0  # fair queueing: bytes granted, on the scale of its class; below 0: none yet
    asks: set[Ask] = field(default_factory=set)  # that have not ended

    def __post_init__(self) -> None:
        self.entered = self.lane = self.cls

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(slots=True, eq=False)
class Ask:
    """A chunk's wish for its share of its volumes. Made and changed by the policy only."""

    request: Request
    units: Units
    number: int  # order of arrival
    state: AskState = AskState.WAITING
    moved: bool = False  # said by who asked: whole, and at the first try
    overtaken: int = 0  # grants on its volumes that were given to others first
    urgent: bool = False  # it was overtaken often enough

    def shares_a_volume(self, other: Ask) -> bool:
        return any(volume in other.units for volume in self.units)

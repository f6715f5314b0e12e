"""What the transfer policy has done, and what waits, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from gdsstore.engines.base import Op
from gdsstore.transfer.policy import TransferPolicy
from gdsstore.transfer.policy_terms import State, TransferClass


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Requests of one class. `waiting`, `oldest_s` (how long the oldest of them has waited) and `running` are of now."""

    waiting: int
    oldest_s: float
    running: int
    started: int
    joined: int
    done: int
    cancelled: int
    dropped: int
    expired: int
    refused: int


@dataclass(frozen=True, slots=True)
class VolumeStats:
    """Bytes and operations of one volume: under way now, late (the engine has not let go of them), granted ever, and what may be
    under way in each direction as learned so far."""

    in_flight_bytes: int
    in_flight_ops: int
    late_bytes: int
    late_ops: int
    read_bytes: int
    read_ops: int
    write_bytes: int
    write_ops: int
    read_cap_bytes: int
    write_cap_bytes: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """`classes` by the names of TransferClass in small letters; `volumes` by index."""

    classes: dict[str, ClassStats]
    volumes: list[VolumeStats]


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes of reads, on all volumes: granted ever, under way now, and of loads that have not begun."""

    granted_bytes: int
    under_way_bytes: int
    waiting_bytes: int


def reads_of(policy: TransferPolicy) -> Reads:
    waiting = (request.nbytes for request in policy.waiting if request.cls is TransferClass.LOAD)
    return Reads(
        sum(each.granted[Op.READ].nbytes for each in policy.volumes),
        sum(each.reading for each in policy.volumes),
        sum(waiting),
    )


def snapshot(policy: TransferPolicy, now: float) -> TransferStats:
    depth = [0] * len(TransferClass)
    since = [now] * len(TransferClass)
    for request in policy.waiting:
        depth[request.entered] += 1
        since[request.entered] = min(since[request.entered], request.since)
    running, counts = policy.running, policy.counts
    classes = {
        cls.name.lower(): ClassStats(
            waiting=depth[cls],
            oldest_s=now - since[cls],
            running=running[cls],
            started=counts[cls, State.RUNNING],
            joined=counts[cls, State.JOINED],
            done=counts[cls, State.DONE],
            cancelled=counts[cls, State.CANCELLED],
            dropped=counts[cls, State.DROPPED],
            expired=counts[cls, State.EXPIRED],
            refused=counts[cls, State.REFUSED],
        )
        for cls in TransferClass
    }
    volumes = [
        VolumeStats(
            each.nbytes,
            each.ops,
            each.late_nbytes,
            each.late_ops,
            *each.granted[Op.READ],
            *each.granted[Op.WRITE],
            each.caps[Op.READ].nbytes,
            each.caps[Op.WRITE].nbytes,
        )
        for each in policy.volumes
    ]
    return TransferStats(classes, volumes)

"""Which chunk goes to the engine next: the caps of the volumes, and the order of those that wait for room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gdsstore.engines.base import Op
from gdsstore.errors import ArgumentError
from gdsstore.transfer.caps import LearnedCaps
from gdsstore.transfer.policy_terms import Ask, AskState, Caps, Cost, Request, TransferClass, Units

STILL_S: Final = 1.0
"""A volume on which nothing ended for this long, though something is under way, stands still."""


class VolumeLoad:
    """What is under way on one volume. Counts in bytes and operations."""

    __slots__ = (
        "caps",
        "chunks",
        "granted",
        "late_nbytes",
        "late_ops",
        "moved_at",
        "nbytes",
        "ops",
        "reading",
    )

    def __init__(self, caps: Caps) -> None:
        self.caps = dict.fromkeys(Op, caps)
        self.chunks = self.nbytes = self.ops = 0
        self.reading = 0  # of nbytes
        self.late_nbytes = self.late_ops = 0
        self.moved_at = 0.0  # when the last chunk began on it while it was idle, or ended
        self.granted = {op: Cost(0, 0) for op in Op}

    def room_for(self, op: Op, cost: Cost) -> bool:
        """Each direction has its own cap of bytes, and both together have the larger one. What the engine still holds of late
        chunks counts. One chunk alone always fits: one larger than the caps could never move otherwise, and nobody would find out
        that a drive has come back."""
        if self.chunks == 0:
            return True
        own = self.reading if op is Op.READ else self.nbytes - self.reading
        more, caps = self.late_nbytes + cost.nbytes, self.caps[op]
        return (
            own + more <= caps.nbytes
            and self.nbytes + more <= max(each.nbytes for each in self.caps.values())
            and self.ops + self.late_ops + cost.ops <= caps.ops
        )

    def stands_still(self, now: float) -> bool:
        return self.chunks > 0 and now - self.moved_at > STILL_S

    def take(self, op: Op, cost: Cost, now: float) -> None:
        if self.chunks == 0:
            self.moved_at = now
        self.chunks += 1
        self.nbytes += cost.nbytes
        self.reading += cost.nbytes if op is Op.READ else 0
        self.ops += cost.ops
        total = self.granted[op]
        self.granted[op] = Cost(total.nbytes + cost.nbytes, total.ops + cost.ops)

    def give(self, op: Op, cost: Cost, now: float) -> None:
        self.moved_at = now
        self.chunks -= 1
        self.nbytes -= cost.nbytes
        self.reading -= cost.nbytes if op is Op.READ else 0
        self.ops -= cost.ops


class Admission:
    """Grants chunks their share of the volumes.

    Order: by class; within a class reads before writes; then prefetch by deadline and the smaller first; then the request that
    was granted the fewest bytes. A chunk that lacks room on a volume holds back the later ones on that volume; a read that waits
    holds back writes on all its volumes. So that nobody waits for ever, an ask that was overtaken `turn` times goes before all
    others, and holds back everything on all its volumes until it has room, except on account of a volume that stands still.
    """

    def __init__(self, caps: Sequence[Caps], turn: int, learned: LearnedCaps | None) -> None:
        """`learned`: takes the place of the caps in bytes."""
        self.volumes = [VolumeLoad(each) for each in caps]
        self._learned = learned
        self._turn = turn
        self._asks: list[Ask] = []  # that wait
        self._arrivals = 0
        self._served = [0.0] * len(TransferClass)  # fair queueing: where each class is, in bytes

    def __len__(self) -> int:
        """Asks that wait."""
        return len(self._asks)

    def ask(self, request: Request, units: Units, now: float) -> tuple[Ask, list[Ask]]:
        """A chunk's ask, and those that have been granted because of it, itself among them where there was room.

        Raises ArgumentError for a volume that is not there.
        """
        for volume in units:
            if not 0 <= volume < len(self.volumes):
                raise ArgumentError("there is no such volume", volume=volume, volumes=len(self.volumes))
        self._arrivals += 1
        ask = Ask(request, units, self._arrivals)
        request.asks.add(ask)
        request.tag = max(request.tag, self._served[request.cls])
        if not self._asks and all(self.volumes[v].room_for(request.op, cost) for v, cost in units.items()):
            self._grant(ask, now)
            return ask, [ask]
        self._asks.append(ask)
        return ask, self.dispatch(now)

    def late(self, ask: Ask, now: float) -> list[Ask]:
        """A granted chunk ran into its deadline. Returns what has been granted now."""
        if ask.state is not AskState.GRANTED:
            return []
        ask.state = AskState.LATE
        for index, cost in ask.units.items():
            volume = self.volumes[index]
            volume.give(ask.request.op, cost, now)
            volume.late_nbytes += cost.nbytes
            volume.late_ops += cost.ops
            if self._learned is not None:
                self._learned.disturbed(index)
        return self.dispatch(now)

    def end(self, asks: Iterable[Ask], now: float) -> list[Ask]:
        """Chunks have ended, or are not wanted any more. Returns what has been granted now."""
        for ask in asks:
            if ask.state is AskState.WAITING:
                self._asks.remove(ask)
            elif ask.state is AskState.GRANTED:
                for index, cost in ask.units.items():
                    self.volumes[index].give(ask.request.op, cost, now)
                    self._learn(index, ask, cost, now)
            elif ask.state is AskState.LATE:
                for index, cost in ask.units.items():
                    self.volumes[index].late_nbytes -= cost.nbytes
                    self.volumes[index].late_ops -= cost.ops
            else:
                continue
            ask.state = AskState.ENDED
            ask.request.asks.discard(ask)
        return self.dispatch(now)

    def dispatch(self, now: float) -> list[Ask]:
        """Grant what may go."""
        granted: list[Ask] = []
        while self._asks and (ask := self._next(now)) is not None:
            self._asks.remove(ask)
            self._grant(ask, now)
            granted.append(ask)
        return granted

    def _next(self, now: float) -> Ask | None:
        held: set[int] = set()  # volumes on which nothing may go any more
        held_writes: set[int] = set()
        for ask in sorted(self._asks, key=_order) if len(self._asks) > 1 else self._asks:
            op = ask.request.op
            lacking = [v for v, cost in ask.units.items() if not self.volumes[v].room_for(op, cost)]
            reads = op is Op.READ
            if self._learned is not None:
                for volume in lacking:
                    self._learned.lacked(volume, op, now)
            free = held.isdisjoint(ask.units) and (reads or held_writes.isdisjoint(ask.units))
            if free and not lacking:
                return ask
            held.update(lacking)
            if not any(self.volumes[volume].stands_still(now) for volume in lacking):
                if ask.urgent:
                    held.update(ask.units)
                elif reads:
                    held_writes.update(ask.units)
        return None

    def _learn(self, index: int, ask: Ask, cost: Cost, now: float) -> None:
        """What the end of a chunk says of the cap of one of its volumes."""
        if self._learned is None:
            return
        volume, op = self.volumes[index], ask.request.op
        if not ask.moved or volume.late_nbytes:
            self._learned.disturbed(index)
            return
        self._learned.ended(index, op, cost.nbytes, now)
        nbytes = self._learned.nbytes(index, op)
        if nbytes != volume.caps[op].nbytes:
            volume.caps[op] = volume.caps[op]._replace(nbytes=nbytes)

    def _grant(self, ask: Ask, now: float) -> None:
        ask.state = AskState.GRANTED
        request = ask.request
        self._served[request.cls] = max(self._served[request.cls], request.tag)
        for index, cost in ask.units.items():
            self.volumes[index].take(request.op, cost, now)
            request.tag += cost.nbytes
        for other in self._asks:
            if other.shares_a_volume(ask):
                self._pass(ask, other)

    def _pass(self, ask: Ask, other: Ask) -> None:
        """`ask` was granted while `other` waits."""
        later = ask.number > other.number
        if later and not ask.urgent:
            other.overtaken += 1
            other.urgent = other.overtaken >= self._turn
        elif ask.urgent and not later and ask.request.cls is other.request.cls:
            other.overtaken, other.urgent = 0, False  # one turn a class, not one for each of its asks


def _order(ask: Ask) -> tuple[float, ...]:
    if ask.urgent:
        return (-1, ask.number)
    request = ask.request
    writes = request.op is Op.WRITE
    if request.cls is TransferClass.PREFETCH:
        return (request.cls, writes, *request.urgency, request.nbytes, request.tag, ask.number)
    return (request.cls, writes, request.tag, ask.number)

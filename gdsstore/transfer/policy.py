"""The policy of transfers: which request runs next, which chunk goes to the engine next, and what becomes of the others.

Pure: no threads, no clock, no I/O. Each method takes `now` (seconds on any clock that does not go back). `scheduler.py` is the
mechanism around it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from gdsstore.engines.base import Op
from gdsstore.transfer.caps import LearnedCaps
from gdsstore.transfer.policy_lines import KeyLines
from gdsstore.transfer.policy_queues import ReadyQueues
from gdsstore.transfer.policy_terms import (
    Ask,
    AskState,
    Caps,
    Limits,
    Request,
    State,
    TransferClass,
    Units,
)
from gdsstore.transfer.policy_volumes import Admission, VolumeLoad

NO_KEYS: frozenset[object] = frozenset()


class TransferPolicy:
    """Requests of one process, and their chunks.

    A request is QUEUED until `start` hands it out, or JOINED to another one for the same keys; RUNNING until `finish`; then it has
    ended, for good. While it runs it asks for each chunk (`ask`), and gives back what it was granted (`done`). See ReadyQueues
    and Admission for the order.

    What a call changed besides what it returns is in `ended` (requests that waited and have ended) and `decided` (asks that waited
    and do so no more): the caller takes it from there and clears both. After each call that may have made room, call `start`
    until it returns None.

    Not thread-safe.
    """

    def __init__(self, limits: Limits, caps: Sequence[Caps], learned: LearnedCaps | None = None) -> None:
        """`learned`: what the caps in bytes become, from the chunks that end."""
        self.limits = limits
        self.ended: list[Request] = []
        self.decided: list[Ask] = []
        self.counts: Counter[tuple[TransferClass, State]] = Counter()  # entered this state, ever
        self._ready = ReadyQueues(limits)
        self._lines = KeyLines()
        self._admission = Admission(caps, limits.turn, learned)
        self._waiting: dict[Request, None] = {}  # QUEUED and JOINED
        self._depth = [0] * len(TransferClass)
        self._numbers = itertools.count()
        self._next_event = math.inf  # nothing of what waits runs out before

    # --- requests ---

    def submit(
        self,
        cls: TransferClass,
        op: Op,
        nbytes: int,
        deadline: float,
        now: float,
        keys: frozenset[object] = NO_KEYS,
        priority: int = 0,
    ) -> Request:
        """A new request: QUEUED, JOINED, REFUSED where its queue is full, or EXPIRED where its deadline has passed.

        `nbytes`: what it moves in all. `priority`: of a prefetch; a larger one goes first, whatever the deadlines. `keys`: what may
        be under way once only. A request whose keys all belong to one other one joins it, shares its outcome, and makes it go as
        early as it would go itself. One whose keys are under way in part waits for them to be free. Where a request that was
        joined ends without being done, those who joined it take its place.
        """
        request = Request(cls, op, nbytes, deadline, keys, next(self._numbers), now)
        request.urgency = -priority, deadline
        if deadline <= now:
            self._set(request, State.EXPIRED)
        elif self._depth[cls] >= self.limits.queued:
            self._set(request, State.REFUSED)
        else:
            self._wait(request)
            self._enter(request)
        return request

    def start(self, now: float) -> Request | None:
        """The request to run now; None where none waits, or no worker may take one."""
        self.expire(now)
        if not self._waiting or (request := self._ready.pop()) is None:
            return None
        self._no_longer_waits(request)
        self._set(request, State.RUNNING)
        return request

    def finish(self, request: Request, now: float) -> None:
        """The work of a running request has returned or raised. It is DONE, or CANCELLED where it had been told to stop.

        What was granted to it and is neither done nor late is given back.
        """
        self._ready.release(request.lane)
        self._end_asks([ask for ask in request.asks if ask.state is not AskState.LATE], now)
        self._set(request, State.CANCELLED if request.stop else State.DONE)
        self._leave(request)

    def cancel(self, request: Request, now: float) -> None:
        """End a request that waits; tell one that runs to stop, and end its asks that wait."""
        if request.state is State.RUNNING:
            request.stop = True
            self._end_asks([ask for ask in request.asks if ask.state is AskState.WAITING], now)
        elif not request.ended:
            self._end_waiting(request, State.CANCELLED)

    def cancel_waiting(self) -> None:
        """End everything that waits to be started."""
        for request in reversed(
            list(self._waiting)
        ):  # who joined another one ends before it, and takes no place
            self._end_waiting(request, State.CANCELLED)

    def expire(self, now: float) -> None:
        """End what waits and whose deadline has passed, and offloads that waited longer than their budget."""
        if now < self._next_event:
            return
        for request in list(self._waiting):
            if self._runs_out(request) <= now:
                self._end_waiting(request, State.EXPIRED if request.deadline <= now else State.DROPPED)
        self._next_event = min(map(self._runs_out, self._waiting), default=math.inf)

    def next_event(self) -> float:
        """Call `expire` at this time at the latest. Infinity where nothing waits."""
        return self._next_event if self._waiting else math.inf

    # --- chunks ---

    def ask(self, request: Request, units: Units, now: float) -> Ask:
        """Ask for a chunk of a running request: GRANTED at once, WAITING, or ENDED where the request shall stop.

        `units`: volume -> what the chunk takes of it; all or nothing. While a request holds grants it must not wait for another one
        without giving some back: two that do could wait for each other.
        """
        if request.stop or request.ended:
            return Ask(request, units, 0, AskState.ENDED)
        ask, granted = self._admission.ask(request, units, now)
        self.decided += [each for each in granted if each is not ask]
        return ask

    def done(self, ask: Ask, now: float) -> None:
        """A chunk has ended, or its ask is not wanted any more. Idempotent."""
        if ask.state is not AskState.ENDED:
            self.decided += self._admission.end((ask,), now)

    def late(self, ask: Ask, now: float) -> None:
        """A chunk ran into its deadline and the engine has not let go of it: call `done` when it has. Until then what it takes
        counts against the caps, but one chunk may still go at a time."""
        self.decided += self._admission.late(ask, now)

    def set_caps(self, volume: int, caps: Caps, now: float) -> None:
        """New caps of a volume, in both directions. What is under way above them ends as it would."""
        self._admission.volumes[volume].caps = dict.fromkeys(Op, caps)
        self.decided += self._admission.dispatch(now)

    # --- looking ---

    @property
    def volumes(self) -> Sequence[VolumeLoad]:
        return self._admission.volumes

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that are QUEUED or JOINED."""
        return list(self._waiting)

    @property
    def running(self) -> list[int]:
        """Requests that run, by the class in which they were started."""
        return self._ready.running

    @property
    def idle(self) -> bool:
        """Whether nothing is left of anything: no request, no key, no ask, no grant."""
        return (
            not self._waiting
            and not any(self._ready.running)
            and not len(self._ready)
            and not len(self._lines)
            and not len(self._admission)
            and not any(v.chunks or v.late_nbytes or v.late_ops for v in self._admission.volumes)
        )

    # --- inside ---

    def _set(self, request: Request, state: State) -> None:
        request.state = state
        self.counts[request.entered, state] += 1

    def _wait(self, request: Request) -> None:
        self._waiting[request] = None
        self._depth[request.entered] += 1
        self._next_event = min(self._next_event, self._runs_out(request))

    def _no_longer_waits(self, request: Request) -> None:
        del self._waiting[request]
        self._depth[request.entered] -= 1

    def _runs_out(self, request: Request) -> float:
        if request.cls is TransferClass.OFFLOAD:
            return min(request.deadline, request.since + self.limits.offload_budget_s)
        return request.deadline

    def _enter(self, request: Request) -> None:
        """Join, stand in line, or be ready to start."""
        leader = self._lines.leader_for(request) if request.keys else None
        if leader is not None:
            request.leader = leader
            leader.joined.append(request)
            self._set(request, State.JOINED)
            self._raise(leader, request)
            for other in self._lines.ahead_of(leader):
                self._raise(other, request)
            return
        self._set(request, State.QUEUED)
        if not request.keys or self._lines.enter(request):
            self._ready.push(request)
            return
        for other in self._lines.ahead_of(request):
            self._raise(other, request)

    def _raise(self, request: Request, to: Request) -> None:
        """A request goes as early as the one that waits for it."""
        if to.urgency < request.urgency:
            request.urgency = to.urgency
            self._ready.hurry(request)
        if to.cls < request.cls:
            ready = self._ready.discard(request)
            request.cls = to.cls
            request.tag = -1.0  # the new class counts on a scale of its own
            self._next_event = min(self._next_event, self._runs_out(request))
            if ready:
                self._ready.push(request)

    def _end_waiting(self, request: Request, state: State) -> None:
        self._no_longer_waits(request)
        self._ready.discard(request)
        if request.leader is not None:
            request.leader.joined.remove(request)
        self._set(request, state)
        self.ended.append(request)
        if request.leader is None:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """A request that ended gives up its keys, and those who joined it share its outcome or take its place."""
        if not request.keys:
            return
        for free in self._lines.leave(request):
            self._ready.push(free)
        joined, request.joined = request.joined, []
        for other in joined:
            if request.state is State.DONE:
                self._no_longer_waits(other)
                self._set(other, State.DONE)
                self.ended.append(other)
            else:
                other.leader = None
                self._enter(other)

    def _end_asks(self, asks: Sequence[Ask], now: float) -> None:
        waiting = [ask for ask in asks if ask.state is AskState.WAITING]
        if asks:
            self.decided += self._admission.end(asks, now)
            self.decided += waiting

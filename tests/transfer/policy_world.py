"""A transfer policy under a random history, and a model beside it that knows what must hold after each step."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TypeVar

from gdsstore.engines.base import Op
from gdsstore.transfer.caps import LearnedCaps
from gdsstore.transfer.policy import TransferPolicy
from gdsstore.transfer.policy_terms import (
    Ask,
    AskState,
    Caps,
    Cost,
    Limits,
    Request,
    State,
    TransferClass,
)

T = TypeVar("T")
VOLUMES = 3
MAY_FOLLOW: dict[State, set[State]] = {
    State.QUEUED: {State.RUNNING, State.CANCELLED, State.DROPPED, State.EXPIRED},
    State.JOINED: {state for state in State if state is not State.REFUSED},
    State.RUNNING: {State.DONE, State.CANCELLED},
}


class Choices:
    """Small numbers out of bytes: hypothesis shrinks those well, and makes them fast."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, limit: int) -> int:
        self._at += 1
        return self._data[self._at - 1] % limit if self._at <= len(self._data) else 0


class DrawnCaps(LearnedCaps):
    """Learns whatever comes up, each time that a chunk has ended."""

    def __init__(self, choices: Choices, caps: list[dict[Op, Caps]]) -> None:
        super().__init__(VOLUMES, 1, 8, lambda volume, op: True)
        self._choices, self._caps = choices, caps

    def nbytes(self, volume: int, op: Op) -> int:
        return self._caps[volume][op].nbytes

    def ended(self, volume: int, op: Op, nbytes: int, now: float) -> None:
        super().ended(volume, op, nbytes, now)
        caps = self._caps[volume]
        caps[op] = caps[op]._replace(nbytes=2 + self._choices.below(12))


class World:
    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 100.0
        self.caps = [dict.fromkeys(Op, Caps(8, 3)) for _ in range(VOLUMES)]
        self.limits = Limits(2 + choices.below(3), queued=4, offload_budget_s=4.0, turn=2)
        learned = DrawnCaps(choices, self.caps) if choices.below(2) else None
        self.policy = TransferPolicy(self.limits, [Caps(8, 3)] * VOLUMES, learned)
        self.requests: dict[Request, State] = {}  # that have not ended, and the state last seen
        self.over: list[Request] = []
        self.turned_away = 0
        self.asks: list[Ask] = []  # that have not ended
        self.told: Counter[Request] = Counter()
        self.decided: Counter[Ask] = Counter()
        self.waited: set[Ask] = set()
        self.granted: set[Ask] = set()  # seen as such
        self.patience: dict[Ask, int] = {}  # grants to others that each ask that waits must bear with
        self.mine: set[Ask] = set()  # that were ended by whoever asked
        self.ran: set[Request] = set()

    # --- steps ---

    def step(self) -> None:
        steps = [self.submit] * 4 + [self.ask] * 5 + [self.end_ask] * 3
        steps += [self.finish, self.pass_time, self.cancel, self.change_caps]
        steps[self.choices.below(len(steps))]()
        self.check()

    def submit(self) -> None:
        draw = self.choices.below
        cls = list(TransferClass)[draw(4)]
        writes = cls is TransferClass.OFFLOAD or (cls is TransferClass.MAINTENANCE and draw(2))
        bits = draw(64)  # the upper half of the requests has no keys
        keys = frozenset(key for key in range(5) if bits < 32 and bits >> key & 1)
        deadline = self.now + draw(20) - 0.5
        op = Op.WRITE if writes else Op.READ
        request = self.policy.submit(cls, op, 1 + draw(9), deadline, self.now, keys, draw(3))
        if request.ended:
            assert request.state in (State.REFUSED, State.EXPIRED)
            assert (request.state is State.EXPIRED) == (deadline <= self.now)
            self.turned_away += 1
        else:
            self.requests[request] = State.QUEUED if request.state is State.QUEUED else State.JOINED

    def ask(self) -> None:
        request = self._one_of([request for request in self.requests if request.state is State.RUNNING])
        if request is None:
            return
        first, count = self.choices.below(VOLUMES), 1 + self.choices.below(2)
        cost = Cost(1 + self.choices.below(10), 1 + self.choices.below(4))
        ask = self.policy.ask(request, {(first + i) % VOLUMES: cost for i in range(count)}, self.now)
        if ask.state is AskState.ENDED:
            assert request.stop
            return
        self.asks.append(ask)
        if ask.state is AskState.WAITING:
            self.waited.add(ask)
            before = sum(other.state is AskState.WAITING for other in self.asks)
            self.patience[ask] = self.limits.turn * before + before

    def end_ask(self) -> None:
        ask = self._one_of(self.asks)
        if ask is None:
            return
        if ask.state is AskState.WAITING:
            self.mine.add(ask)
        if self.choices.below(4) == 0 and ask.state is AskState.GRANTED:
            self.policy.late(ask, self.now)
        else:
            ask.moved = self.choices.below(4) > 0
            self.policy.done(ask, self.now)
            self.policy.done(ask, self.now)  # idempotent

    def finish(self) -> None:
        request = self._one_of([request for request in self.requests if request.state is State.RUNNING])
        if request is not None:
            self._finish(request)

    def cancel(self) -> None:
        request = self._one_of(list(self.requests))
        if request is not None:
            waited = request.state in (State.QUEUED, State.JOINED)
            self.policy.cancel(request, self.now)
            assert not waited or request.state is State.CANCELLED

    def pass_time(self) -> None:
        self.now += (0.05, 0.4, 1.1, 5.0)[self.choices.below(4)]

    def change_caps(self) -> None:
        volume, caps = (
            self.choices.below(VOLUMES),
            Caps(2 + self.choices.below(12), 1 + self.choices.below(5)),
        )
        self.caps[volume].update(dict.fromkeys(Op, caps))
        self.policy.set_caps(volume, caps, self.now)

    def end_all(self) -> None:
        """Let everything run to its end."""
        for _ in range(1000):
            running = [request for request in self.requests if request.state is State.RUNNING]
            if not running:
                break
            for request in running:
                self._finish(request)
            self.check()
        for ask in self.asks:
            self.policy.done(ask, self.now)
        self.check()
        assert not self.requests
        assert all(request.ended for request in self.over)  # for good

    def cancel_all(self) -> None:
        for request in list(self.requests):
            self.policy.cancel(request, self.now)
            self.check()
        self.end_all()

    def close(self) -> None:
        self.policy.cancel_waiting()
        assert not self.policy.waiting
        self.end_all()

    def _finish(self, request: Request) -> None:
        stopped = request.stop
        self.policy.finish(request, self.now)
        assert request.state is (State.CANCELLED if stopped else State.DONE)
        assert all(ask.state is AskState.LATE for ask in request.asks)

    def _one_of(self, things: list[T]) -> T | None:
        return things[self.choices.below(len(things))] if things else None

    # --- what must hold ---

    def check(self) -> None:
        self._collect()
        while (request := self.policy.start(self.now)) is not None:
            assert request.state is State.RUNNING
            assert request.deadline > self.now
            assert request not in self.ran
            self.ran.add(request)
            self._collect()
        self._collect()
        self._check_states()
        self._check_caps()
        running = [request for request in self.requests if request.state is State.RUNNING]
        for op in Op:
            flying = Counter(itertools.chain.from_iterable(r.keys for r in running if r.op is op))
            assert max(flying.values(), default=0) <= 1, "a key is in flight twice"
        waiting = [request for request in self.requests if request.state in (State.QUEUED, State.JOINED)]
        assert max(Counter(request.entered for request in waiting).values(), default=0) <= self.limits.queued
        for request in waiting:
            assert request.deadline > self.now
            if request.cls is TransferClass.OFFLOAD:
                assert self.now < request.since + self.limits.offload_budget_s
            if request.state is State.QUEUED and not request.keys:
                assert not self._has_a_lane(request.cls), "a worker is idle though a request is ready"
            if request.state is State.JOINED:
                assert request.leader is not None
                assert request.keys <= request.leader.keys
                assert not request.leader.ended
                assert request.leader.cls <= request.cls
        assert self.policy.next_event() > self.now
        for cls in TransferClass:
            assert sum(request.lane >= cls for request in running) <= self.limits.lanes(cls)

    def _has_a_lane(self, cls: TransferClass) -> bool:
        running = self.policy.running
        return all(sum(running[each:]) < self.limits.lanes(each) for each in TransferClass if each <= cls)

    def _collect(self) -> None:
        self.told.update(self.policy.ended)
        self.policy.ended.clear()
        self.decided.update(self.policy.decided)
        self.policy.decided.clear()

    def _check_states(self) -> None:
        for request, before in list(self.requests.items()):
            state = request.state
            ran = request in self.ran
            assert state is before or state in MAY_FOLLOW[before] or (before is State.QUEUED and ran)
            self.requests[request] = state
            if request.ended:
                assert self.told[request] == (not ran), "who waits is told once that it ended"
                assert all(ask.state is AskState.LATE for ask in request.asks)
                self.over.append(request)
                del self.requests[request]
        for ask in self.waited:
            over = ask.state is not AskState.WAITING and ask not in self.mine
            assert self.decided[ask] == over, "who waits for room is told once"
        self.waited = {ask for ask in self.waited if ask.state is AskState.WAITING}
        self.asks = [ask for ask in self.asks if ask.state is not AskState.ENDED]

    def _check_caps(self) -> None:
        new = [ask for ask in self.asks if ask.state is AskState.GRANTED and ask not in self.granted]
        self.granted.update(new)
        for ask in self.waited:
            if new and not any(self.policy.volumes[volume].stands_still(self.now) for volume in ask.units):
                self.patience[ask] -= sum(
                    ask.shares_a_volume(other) for other in new if other.number > ask.number
                )
                assert self.patience[ask] >= 0, "it starves"
        for volume in {volume for ask in new for volume in ask.units}:
            live = [a.units[volume] for a in self.asks if self._flies(a, volume)]
            late = [a.units[volume] for a in self.asks if a.state is AskState.LATE and volume in a.units]
            caps = self.caps[volume]
            if len(live) > 1:
                assert sum(cost.nbytes for cost in live + late) <= max(each.nbytes for each in caps.values())
                assert sum(cost.ops for cost in live + late) <= caps[Op.READ].ops
            for op in {ask.request.op for ask in new if volume in ask.units}:
                mine = [a.units[volume] for a in self.asks if self._flies(a, volume) and a.request.op is op]
                if len(mine) > 1:
                    assert sum(cost.nbytes for cost in mine + late) <= caps[op].nbytes
        self._check_that_something_flies()

    def _flies(self, ask: Ask, volume: int) -> bool:
        return ask.state is AskState.GRANTED and volume in ask.units

    def _check_that_something_flies(self) -> None:
        if self.waited:
            assert any(ask.state is AskState.GRANTED for ask in self.asks), "all wait for nothing"

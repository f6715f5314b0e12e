"""Whatever is asked of the transfer policy in whatever order: its promises hold after each step, and nothing is left in the end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsstore.engines.base import Op
from gdsstore.transfer.policy import TransferPolicy
from gdsstore.transfer.policy_terms import AskState, Caps, Cost, Limits, Request, State, TransferClass
from tests.transfer.policy_world import Choices, World


@pytest.mark.parametrize("ending", ["end_all", "cancel_all", "close"])
@settings(max_examples=1700, suppress_health_check=list(HealthCheck))
@given(data=st.binary(min_size=60, max_size=180))
def test_promises_hold_in_every_history(ending: str, data: bytes) -> None:
    """See World.check for the promises."""
    choices = Choices(data)
    world = World(choices)
    while choices:
        world.step()
    getattr(world, ending)()
    assert world.policy.idle
    counts = world.policy.counts
    ended = (State.DONE, State.CANCELLED, State.DROPPED, State.EXPIRED, State.REFUSED)
    assert sum(counts[cls, state] for cls in TransferClass for state in ended) == (
        len(world.over) + world.turned_away
    )


CLASSES = st.sampled_from(list(TransferClass))


@settings(max_examples=150)
@given(busy=st.lists(CLASSES, min_size=1, max_size=8), waiting=CLASSES, workers=st.integers(1, 4))
def test_no_request_starves_however_many_others_come(
    busy: list[TransferClass], waiting: TransferClass, workers: int
) -> None:
    limits = Limits(workers=workers, turn=4)
    policy = TransferPolicy(limits, [])

    def more(cls: TransferClass) -> Request:
        return policy.submit(cls, Op.READ, 1, 1e6, 0.0)

    ours = [more(waiting) for _ in range(3)]
    starts, number = 0, 0
    running: list[Request] = []
    while any(request.state is State.QUEUED for request in ours):
        for _ in range(2):
            more(busy[number % len(busy)])
            number += 1
        while (request := policy.start(0.0)) is not None:
            running.append(request)
            starts += 1
        policy.finish(running.pop(0), 0.0)
        # Each of the three is passed over `turn` times, and by the two other classes that may be due, and waits for a lane.
        assert starts <= len(ours) * (limits.turn + 2) + 2 * workers


@settings(max_examples=150)
@given(data=st.binary(min_size=300, max_size=500), op=st.sampled_from(list(Op)), cls=CLASSES)
def test_no_chunk_starves_however_many_others_come(data: bytes, op: Op, cls: TransferClass) -> None:
    """A chunk that needs room on two volumes at once waits behind a stream of small ones that keeps both busy."""
    choices = Choices(data)
    limits = Limits(workers=16)
    policy = TransferPolicy(limits, [Caps(8, 8)] * 2)

    def run(cls: TransferClass, op: Op) -> Request:
        request = policy.submit(cls, op, 1, 1e6, now)
        assert policy.start(now) is request
        return request

    now = 0.0
    streams = [run(TransferClass.LOAD, Op.READ) for _ in range(4)]
    asks = [policy.ask(streams[i % 4], {i % 2: Cost(4, 1)}, now) for i in range(4)]
    ours = policy.ask(run(cls, op), {0: Cost(6, 1), 1: Cost(6, 1)}, now)
    grants = 0
    while choices and ours.state is AskState.WAITING:
        now += 0.01
        asks.append(
            policy.ask(streams[choices.below(4)], {choices.below(2): Cost(1 + choices.below(4), 1)}, now)
        )
        granted = [ask for ask in asks if ask.state is AskState.GRANTED]
        if len(asks) - len(granted) > 4 or choices.below(2):
            done = granted[choices.below(len(granted))]
            policy.done(done, now)
            asks.remove(done)
        grants = policy.volumes[0].granted[Op.READ].ops + policy.volumes[1].granted[Op.READ].ops
        assert grants <= limits.turn + 24 or ours.state is AskState.GRANTED

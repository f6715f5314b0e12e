"""Bytes of an arena have one user at a time, and all come back."""

from __future__ import annotations

import itertools
import threading

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gdsstore.errors import DeadlineError
from gdsstore.memory.arena import Arena, Lease
from gdsstore.memory.free_ranges import FreeRanges
from tests.memory.arenas import ROOM, SLOT, SOON_S, small_arena


def test_threads_that_lease_at_once_never_share_a_byte() -> None:
    faults: list[str] = []

    def work(arena: Arena, mark: int) -> None:
        rng = np.random.default_rng(mark)
        for _ in range(150):
            lease = arena.lease(int(rng.integers(1, ROOM // 2)), SOON_S)
            lease.array[:] = mark
            if rng.random() < 0.3:
                polls = iter([False, True])
                view = lease.array
                lease.quarantine(
                    lambda view=view, polls=polls: _owned(view, mark, faults) and next(polls, True)
                )
            else:
                _owned(lease.array, mark, faults)
                lease.release()

    with small_arena() as arena:
        threads = [threading.Thread(target=work, args=(arena, mark), daemon=True) for mark in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON_S)
            assert not thread.is_alive()
        arena.lease(ROOM, SOON_S).release()
        assert arena.stats().waits > 0
    assert not faults


def _owned(view: np.ndarray, mark: int, faults: list[str]) -> bool:
    if not (view == mark).all():
        faults.append(f"bytes of {mark} were written by another")
    return True


class Leases(RuleBasedStateMachine):
    """Random leases, pins, releases and quarantines, against a model that knows which bytes are whose."""

    @initialize()
    def open(self) -> None:
        self.arena = small_arena()
        self.held: list[Lease] = []
        self.pinned: list[Lease] = []  # one pin each, released already
        self.stuck: list[tuple[Lease, list[bool]]] = []

    def _taken(self) -> list[tuple[int, int]]:
        leases = [*self.held, *self.pinned, *(lease for lease, state in self.stuck if not state)]
        return sorted((lease.address, lease.address + lease.reserved_bytes) for lease in leases)

    def _largest_gap(self) -> int:
        taken = [(0, self.arena.address), *self._taken(), (self.arena.address + ROOM, 0)]
        return max(after[0] - before[1] for before, after in itertools.pairwise(taken))

    @rule(nbytes=st.integers(1, ROOM))
    def lease(self, nbytes: int) -> None:
        fits = -(-nbytes // SLOT) * SLOT <= self._largest_gap()
        try:
            self.held.append(self.arena.lease(nbytes, 0))
            assert fits
        except DeadlineError:
            assert not fits
        self.stuck = [(lease, state) for lease, state in self.stuck if not state or lease._done is not None]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1))).release()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_while_pinned(self, data: st.DataObject) -> None:
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        lease.pin()
        lease.release()
        self.pinned.append(lease)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pinned.pop(0).unpin()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        state: list[bool] = []
        lease.quarantine(lambda: bool(state))
        self.stuck.append((lease, state))

    @precondition(lambda self: any(not state for _, state in self.stuck))
    @rule()
    def finish(self) -> None:
        next(state for _, state in self.stuck if not state).append(True)

    @invariant()
    def nobody_shares_a_byte(self) -> None:
        if not hasattr(self, "arena"):
            return
        taken = self._taken()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
        assert all(start >= self.arena.address and end <= self.arena.address + ROOM for start, end in taken)

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for lease in self.held:
            lease.release()
        for lease in self.pinned:
            lease.unpin()
        for _, state in self.stuck:
            state.append(True)
        self.arena.lease(ROOM, 0).release()
        assert self.arena.close(0)


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_leases_never_overlap_and_all_bytes_come_back = Leases.TestCase


def test_free_ranges_fill_the_tightest_gap_and_join_again() -> None:
    free = FreeRanges(100)
    offsets = [free.take(10) for _ in range(10)]
    assert offsets == list(range(0, 100, 10))
    assert free.take(1) is None
    for start, size in ((0, 10), (20, 10), (10, 10), (50, 10)):
        free.give(start, size)
    assert free.largest == 30
    assert free.take(10) == 50  # not out of the 30 that are whole
    assert free.take(30) == 0

"""Leases: waiters are served in order, and bytes come back when pins and transfers end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gdsstore.errors import ArgumentError, DeadlineError
from gdsstore.memory.arena import Arena
from tests.memory.arenas import ROOM, SLOT, SOON_S, Waiter, small_arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    with small_arena() as made:
        yield made


def test_a_lease_shows_its_own_bytes_of_the_arena(arena: Arena) -> None:
    with arena.lease(100, 0), arena.lease(5000, 0) as second:
        assert second.address % SLOT == 0
        assert (second.size_bytes, second.reserved_bytes) == (5000, 2 * SLOT)
        assert second.array.ctypes.data == second.address
        second.array[:] = 9
        assert int((arena.array == 9).sum()) == 5000
        assert arena.stats().leased_bytes == 3 * SLOT
    assert arena.stats().leased_bytes == 0
    assert arena.stats().peak_bytes == 3 * SLOT


def test_leases_are_whole_slots() -> None:
    with small_arena(8 * SLOT, 4 * SLOT) as arena, arena.lease(1, 0) as first, arena.lease(1, 0) as second:
        assert second.address - first.address == 4 * SLOT
        with pytest.raises(DeadlineError):
            arena.lease(1, 0)


@pytest.mark.parametrize("nbytes", [0, -1, ROOM + 1])
def test_a_lease_that_never_fits_is_refused_at_once(arena: Arena, nbytes: int) -> None:
    with arena.lease(ROOM, 0), pytest.raises(ArgumentError):
        arena.lease(nbytes, SOON_S)


def test_a_full_arena_says_so_in_time(arena: Arena) -> None:
    with arena.lease(ROOM, 0):
        with pytest.raises(DeadlineError, match="no room"):
            arena.lease(1, 0.2)
        with pytest.raises(DeadlineError):
            arena.lease(1, 0)
    assert arena.stats().timeouts == 1  # the second did not wait
    arena.lease(ROOM, 0).release()


def test_a_waiter_gets_the_bytes_that_another_releases(arena: Arena) -> None:
    lease = arena.lease(ROOM, 0)
    waiter = Waiter(arena, ROOM).waits()
    lease.release()
    assert waiter.ended().lease is not None
    waiter.lease.release()


def test_a_large_request_is_not_overtaken_by_small_ones(arena: Arena) -> None:
    first, second = arena.lease(ROOM // 2, 0), arena.lease(ROOM // 2, 0)
    large = Waiter(arena, ROOM).waits()
    first.release()
    small = Waiter(arena, SLOT).waits()  # fits at once, but came later
    with pytest.raises(DeadlineError):
        arena.lease(SLOT, 0)
    second.release()
    assert large.ended().lease is not None
    assert small.lease is None
    large.lease.release()
    assert small.ended().lease is not None
    small.lease.release()


def test_those_behind_a_waiter_that_gave_up_are_served(arena: Arena) -> None:
    lease = arena.lease(SLOT, 0)
    large = Waiter(arena, ROOM, timeout_s=0.2).waits()
    small = Waiter(arena, SLOT)
    assert isinstance(large.ended().error, DeadlineError)
    assert small.ended().lease is not None
    small.lease.release()
    lease.release()


def test_a_pinned_lease_ends_with_its_last_pin(arena: Arena) -> None:
    lease = arena.lease(ROOM, 0)
    lease.pin()
    lease.pin()
    lease.release()
    lease.unpin()
    with pytest.raises(DeadlineError):
        arena.lease(1, 0)
    lease.array[:] = 1
    with pytest.raises(ArgumentError):
        lease.pin()
    lease.unpin()
    arena.lease(ROOM, 0).release()
    with pytest.raises(ArgumentError):
        lease.unpin()


def test_release_is_idempotent_and_frees_nobody_elses_bytes(arena: Arena) -> None:
    lease = arena.lease(ROOM, 0)
    lease.release()
    with arena.lease(ROOM, 0):
        lease.release()
        with pytest.raises(DeadlineError):
            arena.lease(1, 0)


def test_an_ended_lease_shows_no_bytes(arena: Arena) -> None:
    lease = arena.lease(1, 0)
    lease.release()
    with pytest.raises(ArgumentError):
        _ = lease.array


def test_quarantined_bytes_come_back_only_when_their_transfer_is_done(arena: Arena) -> None:
    done = threading.Event()
    with arena.lease(ROOM, 0) as lease:
        lease.quarantine(done.is_set)
    assert (arena.stats().leased_bytes, arena.stats().quarantined_bytes) == (0, ROOM)
    with pytest.raises(DeadlineError):
        arena.lease(1, 0.02)
    done.set()
    arena.lease(ROOM, 0).release()
    assert arena.stats().quarantined_bytes == 0


def test_a_waiter_notices_that_a_quarantined_transfer_ended(arena: Arena) -> None:
    done = threading.Event()
    lease = arena.lease(ROOM, 0)
    waiter = Waiter(arena, ROOM).waits()
    lease.quarantine(done.is_set)
    done.set()
    assert waiter.ended().lease is not None
    waiter.lease.release()


def test_a_lease_is_quarantined_only_after_its_last_pin(arena: Arena) -> None:
    lease = arena.lease(ROOM, 0)
    lease.pin()
    lease.quarantine(lambda: True)
    with pytest.raises(DeadlineError):
        arena.lease(1, 0)
    lease.unpin()
    arena.lease(ROOM, 0).release()


def test_a_released_lease_cannot_be_quarantined_any_more(arena: Arena) -> None:
    lease = arena.lease(1, 0)
    lease.release()
    with pytest.raises(ArgumentError):
        lease.quarantine(lambda: True)


def test_a_second_quarantine_is_refused_instead_of_forgotten(arena: Arena) -> None:
    done = threading.Event()
    lease = arena.lease(1, 0)
    lease.quarantine(done.is_set)
    with pytest.raises(ArgumentError):
        lease.quarantine(lambda: True)
    done.set()


def test_a_transfer_whose_state_cannot_be_told_keeps_its_bytes(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    state: list[bool] = []
    lease = arena.lease(ROOM, 0)
    lease.quarantine(lambda: state[0])
    with pytest.raises(DeadlineError):
        arena.lease(1, 0)
    assert "cannot be told" in caplog.text
    state.append(True)
    arena.lease(ROOM, 0).release()


def test_a_transfer_may_use_the_arena_while_it_is_asked(arena: Arena) -> None:
    other = arena.lease(SLOT, 0)
    lease = arena.lease(SLOT, 0)

    def done() -> bool:
        other.release()
        return True

    lease.quarantine(done)
    arena.lease(ROOM, 0).release()

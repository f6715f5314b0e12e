"""Arenas: what they were given is said, and nothing is unmapped under I/O or an array."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import numpy as np
import pytest

from gdsstore.errors import ArgumentError, StoreClosedError
from gdsstore.memory.arena import Arena
from tests.memory.arenas import ROOM, SLOT, SOON_S, Waiter, small_arena


def test_an_arena_is_aligned_writable_and_says_what_it_was_given() -> None:
    with Arena(ROOM + 1, pin="off") as arena:
        assert arena.address % (2 << 20) == 0
        assert arena.size_bytes == ROOM + SLOT
        assert arena.array.shape == (arena.size_bytes,)
        assert arena.array.ctypes.data == arena.address
        arena.array[:] = 7
        assert not arena.grant.pinned
        assert arena.grant.notes


@pytest.mark.parametrize(
    "arguments",
    [
        {"size_bytes": 0},
        {"size_bytes": SLOT, "slot_bytes": 1000},
        {"size_bytes": SLOT, "slot_bytes": 0},
        {"size_bytes": SLOT, "huge_pages": "yes"},
        {"size_bytes": SLOT, "pin": "on"},
        {"size_bytes": SLOT, "numa_node": 4000},
    ],
)
def test_an_arena_that_makes_no_sense_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        Arena(**arguments)  # type: ignore[arg-type]


def test_a_closed_arena_gives_no_leases_and_no_array() -> None:
    arena = small_arena()
    assert arena.close(0)
    assert arena.close(0)
    with pytest.raises(StoreClosedError):
        arena.lease(1, 0)
    with pytest.raises(StoreClosedError):
        _ = arena.array


def test_closing_sends_waiters_away_and_waits_for_leases() -> None:
    arena = small_arena()
    lease = arena.lease(ROOM, 0)
    waiters = [Waiter(arena, ROOM).waits() for _ in range(3)]
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(arena.close(SOON_S)), daemon=True)
    closer.start()
    for waiter in waiters:
        assert isinstance(waiter.ended().error, StoreClosedError)
    assert not closed
    lease.release()
    closer.join(SOON_S)
    assert closed == [True]


def test_memory_under_a_stuck_transfer_stays_mapped_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    arena = small_arena()
    lease = arena.lease(SLOT, 0)
    view = lease.array
    memory = weakref.ref(arena._memory)  # type: ignore[type-var, arg-type]
    lease.quarantine(done.is_set)
    with caplog.at_level(logging.WARNING):
        assert not arena.close(0.01)
    assert "stays allocated" in caplog.text
    del view, lease
    gc.collect()
    assert memory() is not None
    done.set()
    assert arena.close(0)
    gc.collect()
    assert memory() is None


def test_an_arena_that_is_dropped_stays_mapped_under_a_transfer() -> None:
    arena = small_arena()
    memory = weakref.ref(arena._memory)  # type: ignore[type-var, arg-type]
    arena.lease(SLOT, 0).quarantine(lambda: False)
    del arena
    gc.collect()
    kept = memory()
    assert kept is not None
    kept.array[:] = 1


def test_an_arena_that_is_dropped_idle_is_unmapped() -> None:
    arena = small_arena()
    memory = weakref.ref(arena._memory)  # type: ignore[type-var, arg-type]
    arena.lease(SLOT, 0).release()
    del arena
    gc.collect()
    assert memory() is None


def test_an_array_outlives_the_arena_it_shows() -> None:
    arena = small_arena()
    with arena.lease(SLOT, 0) as lease:
        view = lease.array[10:20]
    view[:] = 3
    assert arena.close(0)
    del arena
    gc.collect()
    np.testing.assert_array_equal(view, np.full(10, 3, np.uint8))

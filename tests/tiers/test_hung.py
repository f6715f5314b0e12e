"""Memory that a transfer may still touch is not reused, and the cache ends in time all the same."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from gdsstore.errors import StoreClosedError
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import Origin, Room
from gdsstore.waiting import Deadline
from tests.tiers.caches import (
    BLOCK,
    ONE,
    SOON_S,
    Drive,
    bytes_at,
    check_books,
    keys_of,
    page_of,
    pages_of,
    present,
    put,
    small_cache,
    soon,
    write_at,
)


def test_memory_of_a_hung_read_is_not_reused_until_the_drive_lets_go() -> None:
    cache = small_cache(Drive(), regions=1)
    namespace = cache.namespace(ONE, BLOCK)
    done = threading.Event()
    with namespace.reserve(keys_of(1, 2, 3), Origin.PREFETCH, soon()) as reservation:
        write_at(reservation.address[0], page_of(1))
        late = reservation.address[1:].tolist()
        reservation.commit(np.array([True, False, False]), np.zeros(3, np.uint64))
        reservation.quarantine(done.is_set)
    assert cache.stats().quarantined_records == 2
    assert present(namespace, 1, 2, 3) == [1]
    assert put(namespace, 10, 11, 12, 13) == [Room.GRANTED] * 2 + [Room.NO_ROOM] * 2
    for address in late:
        write_at(address, b"\xff" * BLOCK)  # the late read
    with namespace.get(keys_of(10, 11)) as hold:
        assert [bytes_at(address, BLOCK) for address in hold.address] == [page_of(10), page_of(11)]
    done.set()
    assert put(namespace, 2, 3, 12, 13) == [Room.GRANTED] * 4
    assert cache.stats().quarantined_records == 0
    check_books(cache)
    assert cache.close(0.0)


def test_part_of_a_reservation_can_hang_while_the_rest_goes_on() -> None:
    cache = small_cache(Drive())
    namespace = cache.namespace(ONE, BLOCK)
    with namespace.reserve(keys_of(1, 2), Origin.LOAD, soon()) as reservation:
        reservation.quarantine(lambda: False, np.array([True, False]))
        everything = np.ones(2, np.bool_)
        assert reservation.commit(everything, np.zeros(2, np.uint64)).tolist() == [False, True]
    assert cache.stats().quarantined_records == 1
    check_books(cache)
    assert not cache.close(0.0)


def test_a_state_that_cannot_be_told_counts_as_not_done(caplog: pytest.LogCaptureFixture) -> None:
    cache = small_cache(Drive(), regions=1)
    namespace = cache.namespace(ONE, BLOCK)
    with namespace.reserve(keys_of(1, 2, 3, 4), Origin.LOAD, soon()) as reservation:
        reservation.quarantine(lambda: 1 // 0 == 0)
    assert put(namespace, 5) == [Room.NO_ROOM]
    assert "cannot be told" in caplog.text


def test_a_dirty_record_whose_write_hung_is_not_overwritten_under_the_drive() -> None:
    drive = Drive(refuses=4, hangs=True)
    cache = small_cache(drive, regions=1)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2, 3, 4, standing=Standing.DIRTY)
    assert put(namespace, 5) == [Room.NO_ROOM]
    assert cache.stats().quarantined_records == 4
    assert present(namespace, 1, 2, 3, 4) == [1, 2, 3, 4]
    drive.results[0].in_use = False
    assert put(namespace, 5) == [Room.GRANTED]
    assert drive.written == 4
    check_books(cache)
    assert cache.close(SOON_S)


# --- the end ---


def test_close_writes_what_is_dirty_and_refuses_new_calls() -> None:
    drive = Drive()
    cache = small_cache(drive)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(10), standing=Standing.DIRTY)
    assert cache.close(SOON_S)
    assert cache.close(0.0)
    assert len(drive.pages) == 10
    assert cache.stats().dirty_lost == 0
    for call in (
        lambda: namespace.get(keys_of(1)),
        lambda: namespace.contains(keys_of(1)),
        lambda: namespace.reserve(keys_of(1), Origin.LOAD, soon()),
        lambda: put(namespace, 1),
        lambda: namespace.drop(keys_of(1), soon()),
        lambda: namespace.clear(soon()),
        lambda: namespace.write(keys_of(1), soon()),
        lambda: cache.flush(0.0),
        lambda: cache.namespace(ONE, BLOCK),
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_close_ends_in_time_and_counts_what_a_hung_drive_did_not_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drive = Drive(gate=threading.Event())
    cache = small_cache(drive)
    put(cache.namespace(ONE, BLOCK), *range(10), standing=Standing.DIRTY)
    with caplog.at_level(logging.ERROR):
        assert cache.close(0.05)
    stats = cache.stats()
    assert (stats.dirty_lost, stats.dirty_records, stats.written_back) == (10, 0, 0)
    assert "10 dirty records" in caplog.text
    assert cache.close(0.0)
    assert cache.stats().dirty_lost == 10


def test_close_without_time_writes_nothing_and_counts_all() -> None:
    drive = Drive()
    cache = small_cache(drive)
    put(cache.namespace(ONE, BLOCK), 1, 2, standing=Standing.DIRTY)
    assert cache.close(0.0)
    assert (cache.stats().dirty_lost, drive.calls) == (2, [])


def test_memory_that_is_held_survives_close_and_goes_with_the_next() -> None:
    cache = small_cache(Drive())
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1)
    hold = namespace.get(keys_of(1))
    assert not cache.close(0.01)
    assert bytes_at(hold.address[0], BLOCK) == page_of(1)
    closer: list[bool] = []
    thread = threading.Thread(target=lambda: closer.append(cache.close(SOON_S)), daemon=True)
    thread.start()
    hold.release()
    thread.join(SOON_S)
    assert closer == [True]


def test_close_waits_for_a_hung_transfer_and_keeps_the_memory_where_it_does_not_end() -> None:
    cache = small_cache(Drive())
    done = threading.Event()
    with cache.namespace(ONE, BLOCK).reserve(keys_of(1), Origin.LOAD, soon()) as reservation:
        reservation.quarantine(done.is_set)
    assert not cache.close(0.01)
    done.set()
    assert cache.close(SOON_S)


def test_what_is_committed_after_close_is_not_taken() -> None:
    cache = small_cache(Drive())
    namespace = cache.namespace(ONE, BLOCK)
    reservation = namespace.reserve(keys_of(1), Origin.SAVE, soon())
    assert not cache.close(0.0)
    seen = reservation.commit(reservation.granted, np.zeros(1, np.uint64), Standing.DIRTY)
    assert not seen.any()
    assert cache.stats().dirty_records == 0
    assert cache.close(0.0)


def test_a_put_that_waits_for_room_when_the_cache_closes_is_told() -> None:
    drive = Drive(gate=threading.Event())
    cache = small_cache(drive)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=Standing.DIRTY)
    errors: list[Exception] = []

    def late() -> None:
        try:
            namespace.put(keys_of(99), pages_of(99), Standing.DIRTY, Deadline(SOON_S))
        except StoreClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    assert drive.entered.wait(SOON_S)
    assert not cache.close(0.01)
    drive.gate.set()
    thread.join(SOON_S)
    assert len(errors) == 1
    assert cache.close(SOON_S)
    assert cache.stats().dirty_lost == 16  # counted when close had no more time; the drive took them later

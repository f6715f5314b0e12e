"""Dirty records reach the drive before their memory is reused, or are counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from gdsstore.errors import DeadlineError
from gdsstore.tiers import writing
from gdsstore.tiers.holds import Hold
from gdsstore.tiers.host import HostCache
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import Room
from gdsstore.waiting import Deadline
from tests.tiers.caches import (
    BLOCK,
    ONE,
    SOON_S,
    TWO,
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

DIRTY, TRIAL = Standing.DIRTY, Standing.TRIAL


@pytest.fixture
def drive() -> Drive:
    return Drive()


@pytest.fixture
def cache(drive: Drive) -> Iterator[HostCache]:
    """16 records of 4 KiB, in 4 regions."""
    cache = small_cache(drive)
    yield cache
    check_books(cache)
    drive.refuses = 0
    assert cache.close(timeout_s=SOON_S)


def on_drive(drive: Drive, *numbers: int) -> bool:
    return all(drive.pages.get((ONE, keys_of(n).tobytes())) == page_of(n) for n in numbers)


def test_a_dirty_record_is_written_before_its_memory_is_reused(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    assert cache.stats().dirty_records == 16
    assert cache.stats().dirty_bytes == 16 * BLOCK
    assert not drive.pages
    assert put(namespace, *range(100, 116)) == [Room.GRANTED] * 16
    assert on_drive(drive, *range(16))
    stats = cache.stats()
    assert (stats.dirty_records, stats.written_back, stats.dirty_lost) == (0, 16, 0)


def test_dirty_records_are_written_in_batches_and_in_prefix_order(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    put(namespace, 100)
    assert drive.calls == [[keys_of(n).tobytes() for n in range(16)]]
    assert len(present(namespace, *range(16))) == 15  # the others are clean now, and stay


def test_records_of_two_namespaces_are_written_as_what_they_are(cache: HostCache, drive: Drive) -> None:
    put(cache.namespace(ONE, BLOCK), 1, standing=DIRTY)
    put(cache.namespace(TWO, BLOCK), 1, standing=DIRTY)
    assert cache.flush(SOON_S) == 0
    assert set(drive.pages) == {(ONE, keys_of(1).tobytes()), (TWO, keys_of(1).tobytes())}


def test_dirty_records_of_another_size_are_written_before_their_region_is_taken(
    cache: HostCache, drive: Drive
) -> None:
    put(cache.namespace(ONE, BLOCK), *range(16), standing=DIRTY)
    large = cache.namespace(TWO, 2 * BLOCK)
    large.put(keys_of(1), pages_of(1, page_bytes=2 * BLOCK), Standing.CLEAN, soon())
    assert on_drive(drive, 12, 13, 14, 15)
    assert cache.stats().dirty_records == 12


def test_a_record_that_cannot_be_written_is_tried_again_and_then_counted_as_lost(
    cache: HostCache, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.refuses = 16
    assert put(namespace, *range(100, 104)) == [Room.NO_ROOM] * 4
    stats = cache.stats()
    assert (stats.write_failures, stats.dirty_lost, stats.dirty_records) == (16, 0, 16)
    drive.refuses = 1000
    with caplog.at_level(logging.ERROR):
        assert put(namespace, *range(100, 116)) == [Room.GRANTED] * 4 + [Room.NO_ROOM] * 12
    stats = cache.stats()
    assert (stats.dirty_lost, stats.dirty_records) == (4, 12)  # those whose room was needed twice
    assert "4 dirty records were lost" in caplog.text
    assert len(present(namespace, *range(16))) == 12  # nobody may believe that the others are safe


def test_a_record_that_changed_before_it_was_written_makes_room_and_is_gone(
    cache: HostCache, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.may_be_damaged = True
    with namespace.get(keys_of(1, 2)) as hold:
        for address in hold.address.tolist():
            write_at(address, b"!")
        with caplog.at_level(logging.ERROR):
            assert cache.flush(SOON_S) == 0
        check_books(cache)
        assert present(namespace, *range(16)) == [0, *range(3, 16)]
        assert bytes_at(int(hold.address[0]), 1) == b"!", "who reads it keeps what it had"
    stats = cache.stats()
    assert (stats.damaged, stats.written_back, stats.dirty_lost, stats.write_failures) == (2, 14, 0, 0)
    assert "2 records" in caplog.text
    assert put(namespace, 1, 2) == [Room.GRANTED] * 2
    assert (ONE, keys_of(1).tobytes()) not in drive.pages
    check_books(cache)
    assert cache.stats().pins == 0


def test_a_record_that_failed_is_not_the_first_to_be_tried_again(
    cache: HostCache, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_BYTES", BLOCK)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.refuses = 1
    assert put(namespace, 100) == [Room.NO_ROOM]
    assert put(namespace, 100) == [Room.GRANTED]
    assert drive.calls == [[keys_of(15).tobytes()], [keys_of(14).tobytes()]]
    assert present(namespace, 15) == [15]


def test_failures_of_a_record_do_not_count_against_the_next_in_its_memory(
    cache: HostCache, drive: Drive
) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    for first in (0, 100, 200):
        put(namespace, *range(first, first + 16), standing=DIRTY)
        drive.refuses = 16
        assert put(namespace, *range(900, 916)) == [Room.NO_ROOM] * 16
        namespace.drop(keys_of(*range(first, first + 16)), soon())
    assert cache.stats().dirty_lost == 0


def test_a_record_that_is_being_read_is_not_given_up(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.refuses = 1000
    assert put(namespace, *range(100, 116)) == [Room.NO_ROOM] * 16
    holds: list[Hold] = []

    def read_meanwhile(records: writing.DirtyRecords, deadline: Deadline) -> writing.Written:
        holds.append(namespace.get(keys_of(3, 4)))
        return drive(records, deadline)

    cache._writer._write_back = read_meanwhile
    assert put(namespace, *range(100, 116)).count(Room.GRANTED) == 14
    assert present(namespace, *range(16)) == [3, 4]
    assert cache.stats().dirty_records == 2
    for hold in holds:
        hold.release()


def test_a_failure_after_the_deadline_loses_nothing(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.gate = threading.Event()  # never set: each write fails when its time is up
    for number in range(100, 104):
        result = namespace.put(keys_of(number), pages_of(number), DIRTY, Deadline(0.01))
        assert result.room.tolist() == [Room.NO_ROOM]
    drive.gate = None
    assert cache.stats().dirty_records == 16
    assert cache.flush(SOON_S) == 0
    assert on_drive(drive, *range(16))


def test_after_the_deadline_clean_records_still_make_room(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(8))
    put(namespace, *range(8, 16), standing=DIRTY)
    keys = keys_of(*range(100, 110))
    room = namespace.put(keys, pages_of(*range(100, 110)), DIRTY, Deadline(0.0)).room.tolist()
    assert room == [Room.GRANTED] * 8 + [Room.NO_ROOM] * 2
    assert not drive.calls


def test_a_raising_writer_loses_no_count(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    cache._writer._write_back = lambda records, deadline: 1 // 0
    assert put(namespace, 100) == [Room.NO_ROOM]
    stats = cache.stats()
    assert (stats.write_failures, stats.dirty_lost, stats.dirty_records, stats.pins) == (16, 0, 16, 0)


def test_what_is_being_written_can_be_read_and_is_not_evicted(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.gate = threading.Event()
    outcome: list[list[int]] = []
    thread = threading.Thread(target=lambda: outcome.append(put(namespace, 100)), daemon=True)
    thread.start()
    assert drive.entered.wait(SOON_S)
    with namespace.get(keys_of(*range(16))) as hold:
        assert hold.found.all()
    late = namespace.put(keys_of(200), pages_of(200), DIRTY, Deadline(0.01))
    assert late.room.tolist() == [Room.NO_ROOM]
    drive.gate.set()
    thread.join(SOON_S)
    assert outcome == [[Room.GRANTED]]


def test_room_that_another_call_is_making_is_waited_for(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.gate = threading.Event()
    outcome: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda number=number: outcome.append(put(namespace, number)), daemon=True)
        for number in (100, 101, 102)
    ]
    for thread in threads:
        thread.start()
    assert drive.entered.wait(SOON_S)
    drive.gate.set()
    for thread in threads:
        thread.join(SOON_S)
    assert outcome == [[Room.GRANTED]] * 3


def test_drop_waits_for_a_write_under_way_so_that_nothing_comes_back_after_it(
    cache: HostCache, drive: Drive
) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2, standing=DIRTY)
    drive.gate = threading.Event()
    flusher = threading.Thread(target=lambda: cache.flush(SOON_S), daemon=True)
    flusher.start()
    assert drive.entered.wait(SOON_S)
    with pytest.raises(DeadlineError):
        namespace.drop(keys_of(1), Deadline(0.01))
    assert present(namespace, 1, 2) == [2]
    dropper = threading.Thread(target=lambda: namespace.drop(keys_of(2), soon()), daemon=True)
    dropper.start()
    dropper.join(0.05)
    assert dropper.is_alive()
    drive.gate.set()
    dropper.join(SOON_S)
    flusher.join(SOON_S)
    assert not dropper.is_alive()
    assert not flusher.is_alive()
    stats = cache.stats()
    assert (stats.resident_records, stats.dirty_records, stats.dropped, stats.dirty_lost) == (0, 0, 2, 0)


def test_flush_writes_all_and_says_what_is_left(
    cache: HostCache, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_BYTES", BLOCK)
    monkeypatch.setattr("gdsstore.tiers.host.BATCH_BYTES", 4 * BLOCK)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(10), standing=DIRTY)
    drive.refuses = 12
    assert cache.flush(SOON_S) == 2  # ten fail, then two of the second round
    assert cache.stats().dirty_lost == 0
    assert cache.flush(SOON_S) == 0
    assert on_drive(drive, *range(10))
    assert max(len(call) for call in drive.calls) == 4


def test_a_record_is_written_by_one_at_a_time_and_flush_waits_for_the_other(
    cache: HostCache, drive: Drive
) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.gate = threading.Event()
    first = threading.Thread(target=lambda: put(namespace, 100), daemon=True)
    first.start()
    assert drive.entered.wait(SOON_S)
    left: list[int] = []
    second = threading.Thread(target=lambda: left.append(cache.flush(SOON_S)), daemon=True)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    drive.gate.set()
    first.join(SOON_S)
    second.join(SOON_S)
    assert left == [0]
    assert drive.written == 16


def test_two_calls_that_make_room_write_different_records(
    cache: HostCache, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_BYTES", 4 * BLOCK)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=DIRTY)
    drive.gate = threading.Event()
    threads = [
        threading.Thread(target=lambda number=number: put(namespace, number), daemon=True)
        for number in (100, 101)
    ]
    for thread in threads:
        drive.entered.clear()
        thread.start()
        assert drive.entered.wait(SOON_S)
    drive.gate.set()
    for thread in threads:
        thread.join(SOON_S)
    written = [key for call in drive.calls for key in call]
    assert len(written) == len(set(written)) == 8


# --- on trial ---


def test_a_hit_makes_a_trial_record_due_once(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2, standing=TRIAL)
    assert cache.stats().dirty_records == 0
    with namespace.get(keys_of(1, 3)) as hold:
        assert hold.due.tolist() == [True, False]
    assert not namespace.get(keys_of(9)).due.any()
    with namespace.get(keys_of(1)) as hold:
        assert not hold.due.any()
    assert cache.stats().dirty_records == 1
    put(namespace, 4, standing=DIRTY)
    namespace.write(keys_of(1, 3), soon())  # and no other
    stats = cache.stats()
    assert (stats.dirty_records, stats.written_back) == (1, 1)
    assert list(drive.pages) == [(ONE, keys_of(1).tobytes())]


def test_a_second_save_makes_a_trial_record_due(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, standing=TRIAL)
    result = namespace.put(keys_of(1, 2), pages_of(1, 2), TRIAL, soon())
    assert result.due.tolist() == [True, False]
    assert result.room.tolist() == [Room.PRESENT, Room.GRANTED]
    assert not namespace.put(keys_of(1), pages_of(1), TRIAL, soon()).due.any()
    assert cache.flush(SOON_S) == 0  # due, and nobody said that it was written
    assert list(drive.pages) == [(ONE, keys_of(1).tobytes())]


def test_a_trial_record_that_is_evicted_is_dropped_and_counted_apart(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16), standing=TRIAL)
    put(namespace, *range(100, 116))
    stats = cache.stats()
    assert (stats.trials_dropped, stats.dirty_lost, drive.calls) == (16, 0, [])


def test_a_save_that_wrote_through_makes_a_dirty_record_clean(cache: HostCache, drive: Drive) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, standing=DIRTY)
    put(namespace, 1)
    assert cache.stats().dirty_records == 0
    put(namespace, 1, standing=DIRTY)  # the drive has it already
    assert cache.stats().dirty_records == 0


def test_a_written_record_that_is_saved_as_dirty_elsewhere_stays_counted(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 1, 2, standing=DIRTY)
    assert cache.stats().dirty_records == 2
    namespace.drop(np.concatenate([keys_of(1), keys_of(1)]), soon())
    assert cache.stats().dirty_records == 1

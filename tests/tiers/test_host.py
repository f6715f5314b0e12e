"""What readers of the host cache see, what is evicted first, and that its memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gdsstore.checksum.definition import reference_raw
from gdsstore.errors import ArgumentError
from gdsstore.memory.arena import Arena
from gdsstore.memory.views import describe
from gdsstore.tiers import cached
from gdsstore.tiers.host import HostCache
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import Origin, Room
from tests.tiers.caches import (
    BLOCK,
    ONE,
    REGION,
    TWO,
    Drive,
    bytes_at,
    check_books,
    keys_of,
    page_of,
    pages_of,
    present,
    put,
    record_sums,
    small_cache,
    soon,
    write_at,
)


@pytest.fixture
def cache() -> Iterator[HostCache]:
    """16 records of 4 KiB, in 4 regions."""
    cache = small_cache(Drive())
    yield cache
    check_books(cache)
    assert cache.close(timeout_s=0.0)


def test_what_was_put_is_what_is_got_with_zeros_behind_it(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, 5000)
    namespace.put(keys_of(1, 2), pages_of(1, 2, page_bytes=5000), Standing.CLEAN, soon())
    with namespace.get(keys_of(2, 3, 1)) as hold:
        assert hold.found.tolist() == [True, False, True]
        assert hold.address[1] == 0
        record = bytes_at(hold.address[2], 8192)
        assert record == page_of(1, 5000) + bytes(8192 - 5000)
        assert hold.raw[2] == reference_raw(record)
        assert hold.payload_bytes.tolist() == [5000, 0, 5000]
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (2, 1)
    assert (stats.resident_records, stats.resident_bytes) == (2, 2 * 8192)


def test_what_was_there_before_does_not_show_behind_a_page(cache: HostCache) -> None:
    full, part = cache.namespace(ONE, 2 * BLOCK), cache.namespace(TWO, 5000)
    full.put(keys_of(*range(8)), pages_of(*range(8), page_bytes=2 * BLOCK), Standing.CLEAN, soon())
    part.put(keys_of(*range(8)), pages_of(*range(8), page_bytes=5000), Standing.CLEAN, soon())
    with part.get(keys_of(*range(8))) as hold:
        for number, address in enumerate(hold.address):
            assert bytes_at(address, 2 * BLOCK) == page_of(number, 5000) + bytes(2 * BLOCK - 5000)


def test_a_page_in_pieces_is_put_whole(cache: HostCache) -> None:
    whole = np.frombuffer(page_of(1, 6000), np.uint8)
    pieces = describe(whole.reshape(2, 3000), 2, 3000, writable=False)
    page = type(pieces)(pieces.address.reshape(1, 2), pieces.length.reshape(1, 2), whole)
    cache.namespace(ONE, 6000).put(keys_of(1), page, Standing.CLEAN, soon())
    with cache.namespace(ONE, 6000).get(keys_of(1)) as hold:
        assert bytes_at(hold.address[0], 6000) == whole.tobytes()


def test_equal_keys_of_two_namespaces_are_two_records(cache: HostCache) -> None:
    one, two = cache.namespace(ONE, BLOCK), cache.namespace(TWO, BLOCK)
    put(one, 1)
    assert present(two, 1) == []
    two.put(keys_of(1), pages_of(1, version=2), Standing.CLEAN, soon())
    with one.get(keys_of(1)) as mine, two.get(keys_of(1)) as other:
        assert bytes_at(mine.address[0], BLOCK) == page_of(1)
        assert bytes_at(other.address[0], BLOCK) == page_of(1, version=2)


def test_records_whose_hashes_are_equal_are_told_apart_by_key_and_namespace(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(keys: np.ndarray, digest: bytes) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(keys), 2**64 - 1, np.uint64), np.zeros(len(keys), np.uint64)

    monkeypatch.setattr(cached, "index_keys", same)
    one, two = cache.namespace(ONE, BLOCK), cache.namespace(TWO, BLOCK)
    put(one, 1, 2, 3)
    assert present(two, 1, 2, 3) == []
    two.put(keys_of(1), pages_of(1, version=2), Standing.CLEAN, soon())
    one.drop(keys_of(1, 3), soon())
    assert present(one, 1, 2, 3) == [2]
    with one.get(keys_of(2)) as mine, two.get(keys_of(1)) as other:
        assert bytes_at(mine.address[0], BLOCK) == page_of(2)
        assert bytes_at(other.address[0], BLOCK) == page_of(1, version=2)


def test_a_namespace_has_pages_of_one_size(cache: HostCache) -> None:
    cache.namespace(ONE, BLOCK)
    with pytest.raises(ArgumentError, match="two sizes"):
        cache.namespace(ONE, 2 * BLOCK)


def test_what_is_reserved_is_seen_once_it_is_committed_and_not_before(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    with namespace.reserve(keys_of(1, 2), Origin.PREFETCH, soon()) as reservation:
        for number, address in zip((1, 2), reservation.address, strict=True):
            write_at(address, page_of(number))
        assert present(namespace, 1, 2) == []
        raw = record_sums(reservation.address, BLOCK)
        assert reservation.commit(np.array([False, True]), raw).tolist() == [False, True]
        assert present(namespace, 1, 2) == [2]
    assert present(namespace, 1, 2) == [2]
    with namespace.get(keys_of(2)) as hold:
        assert bytes_at(hold.address[0], BLOCK) == page_of(2)
        assert hold.raw[0] == raw[1]
    assert cache.stats().inserted_prefetch == 1


def test_a_key_is_brought_by_one_at_a_time(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1)
    with namespace.reserve(keys_of(1, 2, 2), Origin.LOAD, soon()) as first:
        assert first.room.tolist() == [Room.PRESENT, Room.GRANTED, Room.FILLING]
        assert put(namespace, 2) == [Room.FILLING]
    assert put(namespace, 2) == [Room.GRANTED]


def test_neighbours_of_a_prefix_lie_one_after_the_other(cache: HostCache) -> None:
    """So that one request to the drive brings them."""
    namespace = cache.namespace(ONE, BLOCK)
    for first in (0, 100):  # the second time on what the first left
        with namespace.reserve(keys_of(*range(first, first + 16)), Origin.LOAD, soon()) as reservation:
            steps = np.diff(reservation.address.astype(np.int64)).reshape(-1)
            assert (steps[:3] == BLOCK).all()
            assert int((steps == BLOCK).sum()) >= 12
            reservation.commit(reservation.granted, np.zeros(16, np.uint64))


# --- what is evicted ---


def test_the_record_that_was_used_longest_ago_goes_first(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    for number in range(16):
        put(namespace, number)
    namespace.get(keys_of(0)).release()
    put(namespace, 16)
    assert present(namespace, *range(17)) == [0, *range(2, 17)]
    assert cache.stats().evictions == 1


def test_of_one_prefix_the_end_goes_first(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16))
    put(namespace, 20, 21, 22)
    assert present(namespace, *range(16)) == list(range(13))
    namespace.get(keys_of(*range(13))).release()  # hits keep that order
    put(namespace, 23, 24, 25, 26, 27)  # the three that were put first, then the end of the hits
    assert present(namespace, *range(16)) == list(range(11))


def test_where_there_is_not_room_for_all_the_head_of_the_prefix_gets_it(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    room = put(namespace, *range(20))
    assert room == [Room.GRANTED] * 16 + [Room.NO_ROOM] * 4
    assert cache.stats().no_room == 4


def test_keys_that_are_there_do_not_make_room_for_the_others_of_their_call(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    for number in range(16):
        put(namespace, number)
    put(namespace, 0, 1, 20, 21)
    assert present(namespace, 0, 1, 20, 21, 2, 3) == [0, 1, 20, 21]
    put(namespace, 0, 1, *range(100, 120))
    assert present(namespace, 0, 1, *range(100, 120)) == [0, 1, *range(100, 114)]
    assert cache.stats().inserted_save == 16 + 2 + 14  # 0 and 1 were there all the time


def test_what_is_held_is_never_evicted_nor_overwritten(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16))
    with namespace.get(keys_of(3, 4, 3)) as hold:
        assert put(namespace, *range(100, 116)).count(Room.GRANTED) == 14
        assert put(namespace, *range(200, 216)).count(Room.GRANTED) == 14
        for number, address in zip((3, 4, 3), hold.address, strict=True):
            assert bytes_at(address, BLOCK) == page_of(number)
        assert cache.stats().pins == 3
    assert put(namespace, *range(300, 316)) == [Room.GRANTED] * 16
    assert cache.stats().pins == 0


def test_what_is_dropped_while_held_misses_but_its_bytes_stay(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16))
    hold = namespace.get(keys_of(5))
    assert namespace.drop(keys_of(5, 50), soon()).tolist() == [True, False]
    assert present(namespace, 5) == []
    put(namespace, *range(100, 116))
    assert bytes_at(hold.address[0], BLOCK) == page_of(5)
    hold.release()
    hold.release()
    assert put(namespace, 5) == [Room.GRANTED]


def test_what_is_dropped_while_it_is_brought_never_appears(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    with namespace.reserve(keys_of(1, 2), Origin.LOAD, soon()) as reservation:
        assert namespace.drop(keys_of(1), soon()).tolist() == [False]
        seen = reservation.commit(reservation.granted, np.zeros(2, np.uint64))
    assert seen.tolist() == [False, True]
    assert present(namespace, 1, 2) == [2]


def test_clear_takes_one_namespace_and_leaves_the_other(cache: HostCache) -> None:
    one, two = cache.namespace(ONE, BLOCK), cache.namespace(TWO, BLOCK)
    put(one, 1, 2, 3)
    put(two, 1)
    assert one.clear(soon()) == 3
    assert present(one, 1, 2, 3) == []
    assert present(two, 1) == [1]
    assert cache.stats().dropped == 3


# --- several record sizes ---


def test_a_record_size_gets_regions_whose_records_are_colder_than_its_own(cache: HostCache) -> None:
    small, large = cache.namespace(ONE, BLOCK), cache.namespace(TWO, 2 * BLOCK)
    put(small, *range(16))
    for number in range(4):
        large.put(keys_of(number), pages_of(number, page_bytes=2 * BLOCK), Standing.CLEAN, soon())
    assert large.contains(keys_of(*range(4))).all()
    assert cache.stats().regions_moved == 2
    assert present(small, *range(16)) == list(range(8))
    # All of the small ones were used just now, so that the large ones make room for each other.
    large.put(keys_of(9), pages_of(9, page_bytes=2 * BLOCK), Standing.CLEAN, soon())
    assert cache.stats().regions_moved == 2
    assert present(small, *range(8)) == list(range(8))


def test_a_region_with_a_held_record_keeps_its_size(cache: HostCache) -> None:
    small, large = cache.namespace(ONE, BLOCK), cache.namespace(TWO, 2 * BLOCK)
    put(small, *range(16))
    with small.get(keys_of(0, 4, 8)) as hold:  # one in each of three regions
        keys, pages = keys_of(*range(8)), pages_of(*range(8), page_bytes=2 * BLOCK)
        room = large.put(keys, pages, Standing.CLEAN, soon()).room
        assert room.tolist() == [Room.GRANTED] * 2 + [Room.NO_ROOM] * 6
        for number, address in zip((0, 4, 8), hold.address, strict=True):
            assert bytes_at(address, BLOCK) == page_of(number)


def test_an_emptied_region_goes_to_whoever_needs_it(cache: HostCache) -> None:
    small, large = cache.namespace(ONE, BLOCK), cache.namespace(TWO, REGION)
    put(small, *range(16))
    small.drop(keys_of(4, 5, 6, 7), soon())
    large.put(keys_of(1), pages_of(1, page_bytes=REGION), Standing.CLEAN, soon())
    assert len(present(small, *range(16))) == 12
    assert cache.stats().evictions == 0


def test_records_larger_than_a_region_are_not_cached(cache: HostCache) -> None:
    huge = cache.namespace(ONE, REGION + 1)
    room = huge.put(keys_of(1), pages_of(1, page_bytes=REGION + 1), Standing.DIRTY, soon()).room
    assert room.tolist() == [Room.NO_ROOM]
    assert not huge.get(keys_of(1)).found.any()


# --- what is counted ---


def test_records_that_leave_without_a_hit_are_counted_by_what_brought_them(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    for first, origin in ((0, Origin.PREFETCH), (4, Origin.LOAD), (8, Origin.SAVE)):
        numbers = range(first, first + 4)
        namespace.put(keys_of(*numbers), pages_of(*numbers), Standing.CLEAN, soon(), origin=origin)
    namespace.get(keys_of(0, 4, 5, 8, 9, 10)).release()
    put(namespace, *range(100, 116))
    stats = cache.stats()
    assert (stats.inserted_prefetch, stats.inserted_load, stats.inserted_save) == (4, 4, 4 + 16)
    assert (stats.unused_prefetch, stats.unused_load, stats.unused_save) == (3, 2, 1)
    assert stats.evictions == 12
    put(namespace, *range(200, 216))  # where records lay that had been hit
    assert cache.stats().unused_save == 1 + 16


def test_looking_is_not_a_use(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, *range(16))
    assert namespace.contains(keys_of(*range(16))).all()
    put(namespace, *range(100, 116))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.unused_save) == (0, 0, 16)


# --- what is refused ---


def test_pages_and_sums_that_do_not_fit_are_refused_before_anything_is_done(cache: HostCache) -> None:
    namespace = cache.namespace(ONE, BLOCK)
    with pytest.raises(ArgumentError, match="keys"):
        namespace.put(keys_of(1), pages_of(1, 2), Standing.CLEAN, soon())
    with pytest.raises(ArgumentError, match="layout"):
        namespace.put(keys_of(1), pages_of(1, page_bytes=100), Standing.CLEAN, soon())
    with pytest.raises(ArgumentError, match="raw"):
        namespace.put(keys_of(1), pages_of(1), Standing.CLEAN, soon(), raw=np.zeros(2, np.uint64))
    with (
        namespace.reserve(keys_of(1), Origin.LOAD, soon()) as reservation,
        pytest.raises(ArgumentError, match="commit"),
    ):
        reservation.commit(np.ones(2, np.bool_), np.zeros(2, np.uint64))
    assert present(namespace, 1) == []


@pytest.mark.parametrize("region_bytes", [0, 1000, 2 * BLOCK])
def test_regions_that_make_no_sense_are_refused(region_bytes: int) -> None:
    arena = Arena(BLOCK, BLOCK, huge_pages="off", pin="off")
    with pytest.raises(ArgumentError, match="region"):
        HostCache(lambda: arena, Drive(), region_bytes=region_bytes)
    assert arena.close(0.0)


@pytest.mark.parametrize(("digest", "page_bytes"), [(b"short", BLOCK), (ONE, 0), (ONE, 1 << 40)])
def test_namespaces_that_make_no_sense_are_refused(cache: HostCache, digest: bytes, page_bytes: int) -> None:
    with pytest.raises(ArgumentError):
        cache.namespace(digest, page_bytes)

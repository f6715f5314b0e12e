"""Records that are lent stay where they are, never too many of them, and only such as the drive has too."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.tiers.holds import Loan
from gdsstore.tiers.host import HostCache
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import Origin, Room
from tests.tiers.caches import (
    BLOCK,
    ONE,
    REGION,
    SOON_S,
    TWO,
    Drive,
    bytes_at,
    check_books,
    keys_of,
    page_of,
    put,
    small_cache,
    soon,
)

PLENTY = 1 << 30


def test_a_lent_record_stays_until_it_is_given_back() -> None:
    cache = small_cache(Drive(), regions=1)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2, 3, 4)
    loan = namespace.lend(keys_of(2, 9), "a", PLENTY, PLENTY)
    assert loan.found.tolist() == [True, False]
    assert loan.offset[0] % BLOCK == 0
    assert put(namespace, 5, 6, 7, 8) == [Room.GRANTED] * 3 + [Room.NO_ROOM]
    base = cache._core.address
    assert bytes_at(base + int(loan.offset[0]), BLOCK) == page_of(2)
    loan.release()
    assert put(namespace, 8) == [Room.GRANTED]
    check_books(cache)
    assert cache.close(0)


def test_a_record_that_is_dropped_while_it_is_lent_keeps_its_bytes() -> None:
    cache = small_cache(Drive(), regions=1)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2, 3, 4)
    loan = namespace.lend(keys_of(1), "a", PLENTY, PLENTY)
    namespace.clear(soon())
    assert put(namespace, 5, 6, 7, 8).count(Room.GRANTED) == 3
    assert bytes_at(int(loan.address[0]), BLOCK) == page_of(1)
    loan.release()
    check_books(cache)


def test_only_what_the_drive_has_is_lent() -> None:
    cache = small_cache(Drive())
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1)
    put(namespace, 2, standing=Standing.DIRTY)
    put(namespace, 3, standing=Standing.TRIAL)
    assert namespace.lend(keys_of(1, 2, 3), "a", PLENTY, PLENTY).found.tolist() == [True, False, False]
    assert cache.stats().dirty_records == 1, "a loan is no second use"
    cache.flush(SOON_S)
    assert namespace.lend(keys_of(2), "a", PLENTY, PLENTY).found.all()


def test_no_more_is_lent_than_the_limits_allow() -> None:
    cache = small_cache(Drive())
    one, two = cache.namespace(ONE, BLOCK), cache.namespace(TWO, 2 * BLOCK)
    put(one, 1, 2, 3, 4)
    with two.reserve(keys_of(5), Origin.LOAD, soon()) as reservation:
        reservation.commit(np.ones(1, np.bool_), np.zeros(1, np.uint64))
    a = one.lend(keys_of(1, 2, 3, 4), "a", 3 * BLOCK, 5 * BLOCK)
    assert a.found.tolist() == [True, True, True, False]
    assert not one.lend(keys_of(1), "a", 3 * BLOCK, 5 * BLOCK).found.any(), (
        "a record that is lent twice counts twice"
    )
    b = two.lend(keys_of(5), "b", 3 * BLOCK, 5 * BLOCK)
    assert b.found.all()
    assert not one.lend(keys_of(1), "c", 3 * BLOCK, 5 * BLOCK).found.any()
    assert cache.stats().lent_bytes == 5 * BLOCK
    assert cache.stats().not_lent == 3
    b.release()
    assert one.lend(keys_of(1), "c", 3 * BLOCK, 5 * BLOCK).found.any()
    a.release()
    assert cache.stats().lent_bytes == BLOCK


def test_part_of_a_loan_can_be_given_back_at_once() -> None:
    cache = small_cache(Drive())
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2, 3)
    loan = namespace.lend(keys_of(1, 9, 2, 3), "a", PLENTY, PLENTY)
    loan.keep(np.array([False, True, True, False]))
    assert loan.found.tolist() == [False, False, True, False]
    assert cache.stats().lent_bytes == BLOCK == cache.stats().pins * BLOCK
    assert bytes_at(cache._core.address + int(loan.offset[2]), BLOCK) == page_of(2)
    loan.release()
    assert cache.stats().pins == 0


def counted(cache: HostCache) -> tuple[int, int, int, int]:
    stats = cache.stats()
    return stats.hits, stats.misses, stats.lent, stats.not_lent


def test_a_record_that_is_not_lent_in_the_end_is_no_hit() -> None:
    cache = small_cache(Drive(), regions=1)
    namespace = cache.namespace(ONE, BLOCK)
    with namespace.reserve(keys_of(1, 2, 3, 4), Origin.PREFETCH, soon()) as reservation:
        reservation.commit(np.ones(4, np.bool_), np.zeros(4, np.uint64))
    loan = namespace.lend(keys_of(1, 9, 2, 3), "a", 2 * BLOCK, PLENTY)
    loan.keep(np.array([False, True, True, True]))
    assert counted(cache) == (1, 2, 1, 1)
    loan.release()
    assert counted(cache) == (1, 2, 1, 1)
    put(namespace, 11, 12, 13, 14)
    assert cache.stats().unused_prefetch == 3, "what was given back at once was of no use to anybody"


def test_a_loan_that_comes_to_nothing_counts_nothing() -> None:
    cache = small_cache(Drive())
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2)
    namespace.lend(keys_of(1, 2), "a", PLENTY, PLENTY).release()
    assert counted(cache) == (0, 0, 0, 0)


@given(
    asked=st.lists(
        st.tuples(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(0, 255), st.booleans()),
        max_size=8,
    ),
    standing=st.sampled_from([Standing.CLEAN, Standing.DIRTY]),
)
def test_every_key_that_is_asked_for_is_lent_or_not_or_missed(
    asked: list[tuple[list[int], int, bool]], standing: Standing
) -> None:
    cache = small_cache(Drive(), regions=2)
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2, 3, 4, 5)
    put(namespace, 6, 7, standing=standing)
    keys = lent = 0
    loans = []
    for numbers, bits, stays in asked:
        loan = namespace.lend(keys_of(*numbers), "a", 6 * BLOCK, REGION)
        loan.keep(np.array([bool(bits >> i & 1) for i in range(len(numbers))]))
        keys, lent = keys + len(numbers), lent + int(loan.found.sum())
        hits, misses, given_out, not_lent = counted(cache)
        assert hits == given_out == lent
        assert hits + misses + not_lent == keys
        check_books(cache)
        if stays:
            loans.append(loan)
        else:
            loan.release()
    for loan in loans:
        loan.release()
    assert cache.stats().pins == 0
    assert cache.close(SOON_S)


def test_a_loan_ends_once_whoever_gives_it_back() -> None:
    cache = small_cache(Drive())
    namespace = cache.namespace(ONE, BLOCK)
    put(namespace, 1, 2)
    other = namespace.lend(keys_of(1, 2), "a", PLENTY, PLENTY)
    for _ in range(50):
        loan = namespace.lend(keys_of(1, 2), "a", PLENTY, PLENTY)
        threads = [threading.Thread(target=loan.release) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
        assert cache.stats().pins == 2
    other.release()
    assert (cache.stats().pins, cache.stats().lent_bytes) == (0, 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("lend"),
                st.lists(st.integers(0, 12), min_size=1, max_size=6),
                st.sampled_from(["a", "b"]),
            ),
            st.tuples(st.just("release"), st.integers(0, 5), st.just("")),
            st.tuples(
                st.just("put"), st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), st.just("")
            ),
        ),
        max_size=25,
    )
)
def test_in_any_order_lent_records_are_what_they_were(steps: list[tuple[str, list[int] | int, str]]) -> None:
    cache = small_cache(Drive(), regions=2)
    namespace = cache.namespace(ONE, BLOCK)
    loans: list[tuple[Loan, list[int], str]] = []
    for what, which, owner in steps:
        if what == "put" and isinstance(which, list):
            put(namespace, *which)
        elif what == "lend" and isinstance(which, list):
            loans.append((namespace.lend(keys_of(*which), owner, 3 * BLOCK, REGION), which, owner))
        elif isinstance(which, int) and which < len(loans):
            loans.pop(which)[0].release()
        for loan, numbers, _ in loans:
            for i in np.flatnonzero(loan.found).tolist():
                assert bytes_at(int(loan.address[i]), BLOCK) == page_of(numbers[i])
        lent = {name: sum(int(loan.found.sum()) for loan, _, by in loans if by == name) for name in "ab"}
        assert cache.stats().lent_bytes == BLOCK * sum(lent.values()) <= REGION
        assert max(lent.values()) <= 3
        check_books(cache)
    for loan, _, _ in loans:
        loan.release()
    assert cache.stats().pins == 0
    assert cache.close(0)

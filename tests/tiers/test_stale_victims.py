"""Making room gives the lock up while a drive writes: what was to make room before may be somebody else's by then."""

from __future__ import annotations

import threading

import numpy as np

from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import Origin, Room
from tests.tiers.caches import (
    BLOCK,
    ONE,
    REGION,
    TWO,
    Drive,
    keys_of,
    page_of,
    pages_of,
    record_sums,
    small_cache,
    soon,
    write_at,
)

SOON_S = 60.0


def test_a_row_that_was_given_to_another_key_meanwhile_is_not_written() -> None:
    drive = Drive()
    cache = small_cache(drive, regions=2)
    one, two = cache.namespace(ONE, BLOCK), cache.namespace(TWO, 5000)
    old, coldest, others = list(range(100, 100 + REGION // (2 * BLOCK))), [0], list(range(1, REGION // BLOCK))
    for namespace, numbers, nbytes, standing in (
        (two, old, 5000, Standing.DIRTY),
        (one, coldest, BLOCK, Standing.DIRTY),
        (one, others, BLOCK, Standing.CLEAN),
    ):
        put = namespace.put(keys_of(*numbers), pages_of(*numbers, page_bytes=nbytes), standing, soon())
        assert (put.room == Room.GRANTED).all()
    drive.gate, drive.refuses = threading.Event(), 1000
    drive.entered.clear()

    more = threading.Thread(
        target=lambda: one.put(keys_of(50), pages_of(50, page_bytes=BLOCK), Standing.DIRTY, soon())
    )
    more.start()  # the colder region of the other size is to make room, and is being written
    assert drive.entered.wait(SOON_S)
    assert len(drive.calls) == 0
    one.drop(keys_of(*coldest), soon())
    with one.reserve(
        keys_of(60), Origin.PREFETCH, soon()
    ) as reservation:  # in the row of the page that was dropped
        assert reservation.granted.all()
        drive.gate.set()
        more.join(SOON_S)
        assert not more.is_alive()
        written = {key for keys in drive.calls for key in keys}
        assert keys_of(60).tobytes() not in written
        write_at(reservation.address[0], page_of(60, BLOCK))
        assert reservation.commit(np.ones(1, np.bool_), record_sums(reservation.address, BLOCK)).all()
    drive.refuses = 0
    assert cache.close(SOON_S)

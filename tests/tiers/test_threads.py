"""Many threads at once: what a reader holds is right, and each dirty record is written, left or counted as lost."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from gdsstore.tiers.host import HostCache
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import Origin, Room
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
    record_sums,
    small_cache,
    soon,
    write_at,
)

THREADS, STEPS = 8, 300
SIZES = {ONE: BLOCK, TWO: 5000}


class Worker:
    def __init__(self, cache: HostCache, seed: int) -> None:
        self.dirty = 0  # records that this thread made dirty
        self.error: BaseException | None = None
        self._cache, self._rng = cache, np.random.default_rng(seed)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for _ in range(STEPS):
                self._step()
        except BaseException as error:
            self.error = error

    def _step(self) -> None:
        rng = self._rng
        digest = ONE if rng.random() < 0.5 else TWO
        namespace, nbytes = self._cache.namespace(digest, SIZES[digest]), SIZES[digest]
        numbers = rng.permutation(24)[: rng.integers(1, 9)].tolist()
        keys, what = keys_of(*numbers), rng.random()
        if what < 0.4:
            with namespace.get(keys) as hold:
                time.sleep(rng.random() * 0.0005)
                for number, found, address in zip(numbers, hold.found, hold.address, strict=True):
                    assert not found or bytes_at(address, nbytes) == page_of(number, nbytes)
        elif what < 0.65:
            result = namespace.put(keys, pages_of(*numbers, page_bytes=nbytes), Standing.DIRTY, soon())
            self.dirty += int((result.room == Room.GRANTED).sum())
        elif what < 0.95:
            with namespace.reserve(keys, Origin.PREFETCH, Deadline(rng.random() * 0.01)) as reservation:
                granted = np.flatnonzero(reservation.granted)
                record_bytes = reservation.record_bytes
                for i in granted.tolist():
                    page = page_of(numbers[i], nbytes)
                    write_at(reservation.address[i], page + bytes(record_bytes - nbytes))
                raw = np.zeros(len(numbers), np.uint64)
                raw[granted] = record_sums(reservation.address[granted], record_bytes)
                if rng.random() < 0.8:
                    reservation.commit(reservation.granted & (rng.random(len(numbers)) < 0.8), raw)
        else:
            self._cache.flush(0.05)


@pytest.mark.parametrize("refuses", [0, 40])
def test_threads_never_see_wrong_bytes_and_lose_nothing_dirty_uncounted(refuses: int) -> None:
    drive = Drive(refuses=refuses)
    cache = small_cache(drive, regions=5)
    workers = [Worker(cache, seed) for seed in range(THREADS)]
    for worker in workers:
        worker.thread.join(3 * SOON_S)
        assert not worker.thread.is_alive()
    assert [worker.error for worker in workers if worker.error is not None] == []
    check_books(cache)
    stats = cache.stats()
    assert stats.pins == 0
    promised = sum(worker.dirty for worker in workers)
    assert promised == stats.written_back + stats.dirty_lost + stats.dirty_records
    assert stats.written_back == drive.written > 0
    assert cache.close(SOON_S)
    for (digest, key), page in drive.pages.items():
        assert page == page_of(int.from_bytes(key[:8], "little"), SIZES[digest])

"""Records are copied and summed in one pass: what is summed is what has arrived."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.checksum.definition import BLOCK_BYTES, reference_raw
from gdsstore.checksum.host import raw_sums
from gdsstore.transfer.checked_copy import copy_checked


@given(st.data(), st.integers(1, 9), st.integers(1, 4), st.integers(0, 40))
def test_every_byte_arrives_where_it_should_and_counts(
    data: st.DataObject, blocks: int, count: int, first_block: int
) -> None:
    record_bytes = blocks * BLOCK_BYTES
    page_bytes = data.draw(st.integers(1, record_bytes))
    k = data.draw(st.integers(1, min(4, page_bytes)))
    cuts = sorted(data.draw(st.sets(st.integers(1, page_bytes), min_size=k, max_size=k)) | {page_bytes})[-k:]
    length = np.diff([0, *cuts]).astype(np.int64)
    gap = data.draw(st.integers(0, 70))
    rng = np.random.default_rng(blocks * 100 + count)
    source = rng.integers(0, 256, (count, record_bytes), np.uint8)
    memory = np.full(count * (page_bytes + k * gap) + gap + 1, 0xEE, np.uint8)
    want, at = memory.copy(), gap
    address = np.zeros((count, k), np.uint64)
    for i in range(count):
        start = 0
        for j, nbytes in enumerate(length.tolist()):
            address[i, j] = memory.ctypes.data + at
            want[at : at + nbytes] = source[i, start : start + nbytes]
            start, at = start + nbytes, at + nbytes + gap
    begins = source.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(record_bytes)
    sums = copy_checked(begins, record_bytes, address, np.tile(length, (count, 1)), first_block)
    assert (memory == want).all()
    assert sums.tolist() == [reference_raw(record.tobytes(), first_block) for record in source]


def test_the_sum_is_that_of_the_copy_while_the_source_changes() -> None:
    n, record_bytes = 64, 16 * BLOCK_BYTES
    source, copy = np.zeros((n, record_bytes), np.uint8), np.zeros((n, record_bytes), np.uint8)
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            source[:] += 1

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        step = np.arange(n, dtype=np.uint64) * np.uint64(record_bytes)
        length = np.full(n, record_bytes, np.int64)
        torn = 0
        for _ in range(20):
            address = copy.ctypes.data + step
            sums = copy_checked(source.ctypes.data + step, record_bytes, address[:, None], length[:, None])
            assert (sums == raw_sums(address, length, np.zeros(n, np.int64))).all()
            torn += len(np.unique(copy)) > 1
        assert torn, "the source did not change during a copy: this shows nothing"
    finally:
        stop.set()
        thread.join()

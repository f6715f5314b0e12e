"""From pages to requests: every byte once, in its place, and blame for exactly the pages that a failure hit."""

from __future__ import annotations

import errno
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.engines.base import RangeResults
from gdsstore.transfer.plan import LAST_SHARE, MERGE_BYTES, ChunkPlan, chunks, plan_chunk

Pages = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # fd, file offset, address, length
BLOCK = 4096


@st.composite
def pages(draw: st.DrawFn) -> Pages:
    """n pages of k pieces: slots and memory that often, but not always, follow each other."""
    n, k = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    record = draw(st.sampled_from([4, 16, 100, 300])) * BLOCK
    fds = np.sort(draw(st.lists(st.integers(3, 5), min_size=n, max_size=n))).astype(np.int32)
    slots = np.cumsum(draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=n, max_size=n)), dtype=np.int64)
    cuts = draw(st.lists(st.integers(0, record // BLOCK), min_size=k - 1, max_size=k - 1))
    bounds = np.array([0, *sorted(cuts), record // BLOCK], np.int64) * BLOCK
    length = np.tile(np.diff(bounds), (n, 1)).reshape(n, k)
    gaps = np.array(
        draw(st.lists(st.sampled_from([0, 0, 0, BLOCK]), min_size=n * k, max_size=n * k)), np.int64
    )
    ends = np.cumsum(length.ravel() + gaps)
    address = (1 << 40) + (ends - length.ravel()).reshape(n, k)
    if draw(st.booleans()) and n > 1:
        address = address[draw(st.permutations(range(n)))]
    return fds, slots * record, address.astype(np.uint64), length


def naive(given_pages: Pages) -> list[tuple[int, int, int, int, int]]:
    """Page, file, file offset, address and length of every piece."""
    out = []
    for page, (fd, start, addresses, lengths) in enumerate(zip(*given_pages, strict=True)):
        at = int(start)
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
            if length:
                out.append((page, int(fd), at, address, length))
            at += length
    return out


@settings(max_examples=300, deadline=None)
@given(pages(), st.booleans())
def test_requests_hold_every_piece_once_and_in_its_place(some: Pages, merge: bool) -> None:
    plan = plan_chunk(*some, merge=merge)
    ranges = plan.ranges
    pieces = list(
        zip(
            plan.page.tolist(),
            ranges.fd[plan.request].tolist(),
            (ranges.file_offset[plan.request] + plan.within).tolist(),
            (ranges.address[plan.request].astype(np.int64) + plan.within).tolist(),
            plan.length.tolist(),
            strict=True,
        )
    )
    assert pieces == naive(some)
    assert ranges.nbytes == some[3].sum()
    assert (ranges.length > 0).all()
    # Requests are exactly the union of their pieces: nothing beside them is touched.
    assert np.array_equal(np.bincount(plan.request, plan.length, len(ranges)).astype(np.int64), ranges.length)
    if not merge:
        assert len(ranges) == len(pieces)


@settings(max_examples=300, deadline=None)
@given(pages())
def test_requests_never_overlap_and_merge_all_that_follows_each_other(some: Pages) -> None:
    ranges = plan_chunk(*some).ranges
    for starts in (ranges.file_offset + (ranges.fd.astype(np.int64) << 50), ranges.address.astype(np.int64)):
        order = np.argsort(starts)
        assert (starts[order][1:] >= (starts + ranges.length)[order][:-1]).all()
    pieces = max([length for *_, length in naive(some)], default=0)
    assert (ranges.length <= MERGE_BYTES + pieces).all()
    follows = (
        (ranges.fd[1:] == ranges.fd[:-1])
        & (ranges.file_offset[1:] == ranges.file_offset[:-1] + ranges.length[:-1])
        & (ranges.address[1:] == ranges.address[:-1] + ranges.length[:-1].astype(np.uint64))
    )
    # Two requests that could be one are so only because together they would be too large.
    together = ranges.length[1:] + ranges.length[:-1]
    assert (together[follows] + 2 * pieces >= MERGE_BYTES).all()


@settings(max_examples=300, deadline=None)
@given(pages(), st.data())
def test_blame_falls_on_exactly_the_pages_that_were_hit(some: Pages, data: st.DataObject) -> None:
    plan = plan_chunk(*some)
    n = len(plan.ranges)
    moved = plan.ranges.length.copy()
    code = np.zeros(n, np.int32)
    for request in range(n):
        match data.draw(st.sampled_from(["whole", "short", "error"])):
            case "short":
                moved[request] = data.draw(st.integers(0, int(moved[request]) - 1))
            case "error":
                code[request] = data.draw(st.sampled_from([errno.EIO, errno.ETIMEDOUT]))
                moved[request] = data.draw(st.integers(0, int(moved[request])))
    results = RangeResults(moved, code)
    whole, worst = [True] * len(some[0]), [0] * len(some[0])
    for page, request, within, length in zip(
        plan.page.tolist(), plan.request.tolist(), plan.within.tolist(), plan.length.tolist(), strict=True
    ):
        whole[page] &= code[request] == 0 and within + length <= moved[request]
        worst[page] = max(worst[page], int(code[request]))
    assert plan.moved(results).tolist() == whole
    assert plan.errors(results).tolist() == worst


def test_a_short_request_spares_the_pages_before_its_end() -> None:
    fd, offset = np.full(3, 3, np.int32), np.arange(3, dtype=np.int64) * BLOCK
    address, length = (offset + BLOCK).astype(np.uint64)[:, None], np.full((3, 1), BLOCK, np.int64)
    plan: ChunkPlan = plan_chunk(fd, offset, address, length)
    assert len(plan.ranges) == 1
    for moved, whole in ((3, [1, 1, 1]), (2, [1, 1, 0]), (1, [1, 0, 0]), (0, [0, 0, 0])):
        results = RangeResults(np.array([moved * BLOCK]), np.zeros(1, np.int32))
        assert plan.moved(results).tolist() == [bool(page) for page in whole]
        one_less = RangeResults(np.array([max(0, moved * BLOCK - 1)]), np.zeros(1, np.int32))
        assert plan.moved(one_less).sum() == max(0, moved - 1)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100), st.booleans())
def test_chunks_cover_all_pages_in_order_and_keep_to_their_size(
    sizes: list[int], chunk: int, taper: bool
) -> None:
    cuts = list(chunks(np.array(sizes, np.int64), chunk, taper=taper))
    assert [page for cut in cuts for page in range(cut.start, cut.stop)] == list(range(len(sizes)))
    assert all(sum(sizes[cut]) <= chunk or cut.stop - cut.start == 1 for cut in cuts)
    for cut, other in itertools.pairwise(cuts):
        left = sum(sizes[cut.start :])
        limit = min(max(left // 2, chunk // LAST_SHARE), chunk) if taper else chunk
        assert sum(sizes[cut.start : other.start + 1]) > limit, "one more page would have fitted"


def test_no_two_neighbours_go_to_the_drive_one_after_the_other() -> None:
    n = 64
    fd, offset = np.full(n, 3, np.int32), np.arange(n, dtype=np.int64) * MERGE_BYTES
    address = (offset + BLOCK).astype(np.uint64)[:, None]
    plan = plan_chunk(fd, offset, address, np.full((n, 1), MERGE_BYTES, np.int64))
    assert sorted(plan.ranges.file_offset.tolist()) == offset.tolist()
    assert not (np.diff(plan.ranges.file_offset) == MERGE_BYTES).any()
    assert (plan.ranges.file_offset[plan.request] == offset).all(), "each page knows its request"

"""How plans are cut for the bounce engine, and what its transfers promise without a device."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.bounce_cut import cut, groups, room
from gdsstore.engines.bounce_transfer import BounceTransfer
from tests.engines.rig import BLOCK

LIMIT = 4 * BLOCK

lengths = st.lists(st.integers(1, 20 * BLOCK), min_size=1, max_size=20)


def ranges(length: list[int]) -> RangePlan:
    n = len(length)
    start = np.arange(n, dtype=np.int64) << 32
    return RangePlan(
        np.arange(n, dtype=np.int32),
        start,
        start.astype(np.uint64) + np.uint64(7),
        np.array(length, np.int64),
    )


@given(length=lengths)
def test_pieces_are_the_plan_in_parts_that_fit(length: list[int]) -> None:
    plan = ranges(length)
    pieces = cut(plan, LIMIT)
    assert (pieces.plan.length <= LIMIT).all()
    assert (pieces.plan.length > 0).all()
    for i in range(len(plan)):
        mine = pieces.plan.take(np.flatnonzero(pieces.source == i))
        before = np.cumsum(mine.length) - mine.length
        assert (mine.fd == plan.fd[i]).all()
        assert np.array_equal(mine.file_offset, plan.file_offset[i] + before)
        assert np.array_equal(mine.address, plan.address[i] + before.astype(np.uint64))
        assert mine.nbytes == plan.length[i]


@given(length=lengths, data=st.data())
def test_groups_have_each_piece_once_on_one_drive_and_fit(length: list[int], data: st.DataObject) -> None:
    pieces = cut(ranges(length), LIMIT).plan
    drive = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=len(pieces), max_size=len(pieces))))
    seen: list[int] = []
    for number, index in groups(drive, pieces.length, LIMIT):
        assert (drive[index] == number).all()
        assert 0 < int(room(pieces.length[index]).sum()) <= LIMIT
        assert (np.diff(index) > 0).all(), "in the plan's order"
        seen += index.tolist()
    assert sorted(seen) == list(range(len(pieces)))


@given(length=lengths, data=st.data())
def test_a_range_has_moved_up_to_its_first_piece_that_is_not_whole(
    length: list[int], data: st.DataObject
) -> None:
    plan = ranges(length)
    pieces = cut(plan, LIMIT)
    n = len(pieces.source)
    fate = data.draw(st.lists(st.sampled_from(["whole", "whole", "short", "failed"]), min_size=n, max_size=n))
    moved, codes = pieces.plan.length.copy(), np.zeros(n, np.int32)
    for i, what in enumerate(fate):
        if what != "whole":
            moved[i] //= 2
            codes[i] = errno.EIO + i if what == "failed" else 0
    results = pieces.results(moved, codes)
    for i in range(len(plan)):
        mine = np.flatnonzero(pieces.source == i).tolist()
        first = next((at for at in mine if fate[at] != "whole"), mine[-1])
        assert results.moved[i] == moved[mine[0] : first + 1].sum()
        assert results.errno[i] == codes[first]


def test_an_empty_plan_has_no_groups_and_no_results() -> None:
    pieces = cut(ranges([]), LIMIT)
    assert list(groups(pieces.plan.length, pieces.plan.length, LIMIT)) == []
    assert len(pieces.results(pieces.plan.length, pieces.plan.fd).moved) == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_group_begins_before_its_transfers_deadline_or_never(begun: bool) -> None:
    told: list[bool] = []
    transfer = BounceTransfer(Op.READ, ranges([BLOCK, BLOCK]), LIMIT, lambda: told.append(transfer.cancelled))
    transfer.expect(2)
    if begun:
        assert transfer.claim()
    assert transfer.wait(0.0).errno.tolist() == [errno.ETIMEDOUT] * 2
    assert told == [True]
    assert not transfer.claim()
    assert transfer.done is not begun
    if begun:
        transfer.end(np.array([0]), np.array([BLOCK]), np.zeros(1, np.int32))
        assert transfer.done
        assert transfer.wait(0.0).moved.tolist() == [BLOCK, 0]

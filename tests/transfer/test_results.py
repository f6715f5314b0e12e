"""One status a key; what is good, what missed and what failed can be told apart by its number."""

from __future__ import annotations

import numpy as np
import pytest

from gdsstore.transfer.results import CallResult, LoadResult, PageStatus


def test_good_outcomes_misses_and_failures_are_told_apart_by_number() -> None:
    for status in PageStatus:
        if status is PageStatus.PENDING:
            continue
        good = status in (PageStatus.SAVED, PageStatus.ALREADY_THERE, PageStatus.LOADED)
        assert CallResult(np.array([status], np.uint8)).all_ok == good
        assert (10 <= status < 20) == status.name.startswith("MISS_")
        assert (status >= 20) == status.name.startswith("FAILED_")


def test_counts_and_reasons() -> None:
    result = CallResult(np.array([1, 2, 2, 20], np.uint8))
    assert result.reasons() == {"SAVED": 1, "ALREADY_THERE": 2, "FAILED_NO_SPACE": 1}
    assert result.count(PageStatus.ALREADY_THERE) == 2
    assert result.ok.tolist() == [True, True, True, False]
    assert not result.all_ok
    assert CallResult(np.zeros(0, np.uint8)).all_ok


@pytest.mark.parametrize(("status", "prefix"), [([3, 3, 3], 3), ([3, 10, 3], 1), ([11, 3], 0), ([], 0)])
def test_the_prefix_of_a_load_ends_at_the_first_gap(status: list[int], prefix: int) -> None:
    assert LoadResult(np.array(status, np.uint8)).prefix == prefix

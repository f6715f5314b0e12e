"""Pages spread over the volumes in proportion to their free space."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from gdsstore.volume.placement import Placement
from gdsstore.volume.volume import Space, Volume


def volumes(free: list[int]) -> list[Volume]:
    made = []
    for index, nbytes in enumerate(free):
        volume = Volume(index, Path(f"/nowhere/{index}"))
        volume.space = lambda nbytes=nbytes: Space(nbytes, 1000)  # type: ignore[method-assign,misc]
        made.append(volume)
    return made


@pytest.mark.parametrize("free", [[1], [1, 1], [3, 1], [100, 50, 50], [10, 0], [0, 0]])
def test_turns_go_by_free_space(free: list[int]) -> None:
    placement = Placement(volumes(free))
    weights = [max(1, nbytes) for nbytes in free]
    turns = 40 * sum(weights) // max(1, min(weights))
    taken = Counter(placement.choose() for _ in range(turns))
    for index, weight in enumerate(weights):
        assert abs(taken[index] - turns * weight / sum(weights)) <= len(free)


def test_equal_volumes_alternate() -> None:
    placement = Placement(volumes([5, 5]))
    turns = [placement.choose() for _ in range(8)]
    assert all(a != b for a, b in itertools.pairwise(turns))


def test_the_roomiest_is_asked_now() -> None:
    made = volumes([5, 9, 7])
    placement = Placement(made)
    assert placement.roomiest() == 1
    made[1].space = lambda: Space(0, 1000)  # type: ignore[method-assign]
    assert placement.roomiest() == 2

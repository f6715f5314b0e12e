"""Of several copies of a page, a rebuild takes the newest that is whole, behind the last deletion."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.catalog.copies import UNSYNCED_NS, choose
from gdsstore.volume.format import ENTRY, Entries

LATER = 10 * UNSYNCED_NS

COPY = st.tuples(
    st.integers(0, 4),  # which page
    st.integers(0, 50).map(lambda n: LATER + n),
    st.booleans(),  # live
    st.booleans(),  # its payload is there
)
OLD = st.tuples(st.integers(0, 4), st.integers(1, 50), st.booleans(), st.booleans())
AHEAD = st.tuples(
    st.integers(0, 4), st.integers(2 * LATER, 2 * LATER + 50), st.booleans(), st.booleans()
)  # written while the clock was wrong
NOW = LATER + 25


@given(
    copies=st.lists(st.one_of(COPY, OLD, AHEAD), max_size=30, unique_by=lambda copy: copy[1]),
)
def test_the_newest_whole_copy_behind_the_last_deletion_counts(
    copies: list[tuple[int, int, bool, bool]],
) -> None:
    entries = np.zeros(len(copies), ENTRY)
    entries["sequence"] = [sequence for _, sequence, _, _ in copies]
    entries["slot"] = np.arange(len(copies))
    asked: list[int] = []

    def arrived(some: Entries) -> npt.NDArray[np.bool_]:
        slots = some["slot"].tolist()
        assert slots == sorted(slots)
        asked.extend(slots)
        return np.array([copies[slot][3] for slot in slots], np.bool_)

    index = np.array([page for page, _, _, _ in copies], np.uint64)
    live = np.array([is_live for _, _, is_live, _ in copies], np.bool_)
    chosen, lost = choose(entries, index, live, arrived, NOW)

    newest = max((sequence for _, sequence, is_live, _ in copies if is_live and sequence <= NOW), default=0)
    right: list[int] = []
    gone: set[int] = set()
    for page in sorted({page for page, _, _, _ in copies}):
        mine = sorted(
            (at for at in range(len(copies)) if copies[at][0] == page), key=lambda at: copies[at][1]
        )
        while True:
            _, sequence, is_live, whole = copies[mine[-1]]
            older = len(mine) > 1 and copies[mine[-2]][2]
            if is_live and not whole and older and sequence > newest - UNSYNCED_NS:
                gone.add(mine.pop())
            else:
                break
        if copies[mine[-1]][2]:
            right.append(mine[-1])
    assert chosen.tolist() == right
    assert set(lost.tolist()) == gone
    assert len(asked) == len(set(asked))

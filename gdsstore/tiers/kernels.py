"""The compiled loops over rows. Called with the cache's lock held; they hold no GIL.

`table` is an open-addressing hash table of row + 1, 0 where empty, so that fresh zero pages are an empty table. `ends` holds
the coldest and the hottest row of the order of use, -1 where there is none. `region_used` and `region_stamp` count the rows
in use of each region, and keep the last call that used one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import I32, I64, U8, U64, Room, Rows, State

_FREE, _FILLING, _READY, _DOOMED = (np.uint8(state) for state in State)
_GRANTED, _PRESENT, _BUSY, _NO_ROOM = (np.uint8(room) for room in Room)
_DIRTY, _TRIAL = np.uint8(Standing.DIRTY), np.uint8(Standing.TRIAL)

F = TypeVar("F", bound=Callable[..., Any])


_njit: Any = numba.njit  # its types differ between numba's releases


def _jit(function: F) -> F:
    compiled: F = _njit(nogil=True, cache=True)(function)
    return compiled


def _inline(function: F) -> F:
    compiled: F = _njit(inline="always")(function)
    return compiled


@_inline
def _home(table: I32, value: np.uint64) -> int:
    return int(
        np.int64(value & np.uint64(table.size - 1))
    )  # an unsigned int would make floats of the sums below


@_inline
def _find(table: I32, rows: Rows, keys: U64, i: int, value: np.uint64, namespace: int) -> int:
    """The row of key i, or -1."""
    place = _home(table, value)
    while table[place] != 0:
        row = int(table[place]) - 1
        at = rows[row]
        if at.hash == value and at.namespace == namespace:
            key = at.key
            if (
                key[0] == keys[i, 0]
                and key[1] == keys[i, 1]
                and key[2] == keys[i, 2]
                and key[3] == keys[i, 3]
            ):
                return row
        place = (place + 1) & (table.size - 1)
    return -1


@_inline
def _unlink(rows: Rows, ends: I32, row: int) -> None:
    older, newer = rows[row].older, rows[row].newer
    if older >= 0:
        rows[older].newer = newer
    else:
        ends[0] = newer
    if newer >= 0:
        rows[newer].older = older
    else:
        ends[1] = older


@_inline
def _link_hottest(rows: Rows, ends: I32, row: int) -> None:
    rows[row].older, rows[row].newer = ends[1], -1
    if ends[1] >= 0:
        rows[ends[1]].newer = row
    else:
        ends[0] = row
    ends[1] = row


@_inline
def _forget(table: I32, rows: Rows, row: int) -> None:
    """Take a row out of the hash table, and close the gap: what was pushed past it moves back."""
    last = table.size - 1
    gap = _home(table, rows[row].hash)
    while table[gap] != row + 1:
        gap = (gap + 1) & last
    place = gap
    while True:
        place = (place + 1) & last
        if table[place] == 0:
            break
        home = _home(table, rows[table[place] - 1].hash)
        if ((place - home) & last) >= ((place - gap) & last):
            table[gap] = table[place]
            gap = place
    table[gap] = 0


@_jit
def find(table: I32, rows: Rows, keys: U64, hashes: U64, namespace: int, out: I32) -> None:
    """For each key its row, ready or filling, or -1."""
    for i in range(len(keys)):
        out[i] = _find(table, rows, keys, i, hashes[i], namespace)


@_jit
def keep_ready(rows: Rows, picked: I32) -> int:
    """Sets to -1 what is not ready. Returns how many are."""
    ready = 0
    for i in range(len(picked)):
        if picked[i] >= 0 and rows[picked[i]].state == _READY:
            ready += 1
        else:
            picked[i] = -1
    return ready


@_jit
def touch(rows: Rows, ends: I32, region_stamp: I64, per_region: int, picked: I32, stamp: int) -> None:
    """Make ready rows, given in prefix order, the hottest: the first the hottest of all, so that leaves go first."""
    for i in range(len(picked) - 1, -1, -1):
        row = picked[i]
        if row >= 0:
            _unlink(rows, ends, row)
            _link_hottest(rows, ends, row)
            rows[row].stamp = stamp
            region_stamp[row // per_region] = stamp


@_jit
def hit(rows: Rows, picked: I32, due: U8) -> int:
    """Pin ready rows for a reader. Returns how many trial rows became dirty; sets their `due`."""
    became = 0
    for i in range(len(picked)):
        row = picked[i]
        if row >= 0:
            rows[row].pins += 1
            rows[row].hit = True
            if rows[row].standing == _TRIAL:
                rows[row].standing = _DIRTY
                due[i] = 1
                became += 1
    return became


@_jit
def claim(
    table: I32,
    rows: Rows,
    region_used: I32,
    per_region: int,
    free: I32,
    count: int,
    keys: U64,
    hashes: U64,
    namespace: int,
    payload_bytes: int,
    origin: int,
    room: U8,
    picked: I32,
) -> int:
    """Give each key that is in neither state a row from the top of the stack `free[:count]`. Returns the new count."""
    for i in range(len(keys)):
        row = _find(table, rows, keys, i, hashes[i], namespace)
        if row >= 0:
            room[i] = _PRESENT if rows[row].state == _READY else _BUSY
            continue
        if count == 0:
            room[i] = _NO_ROOM
            continue
        count -= 1
        row = int(free[count])
        at = rows[row]
        for word in range(4):
            at.key[word] = keys[i, word]
        at.hash = hashes[i]
        at.namespace = namespace
        at.payload_bytes = payload_bytes
        at.origin = origin
        at.state = _FILLING
        at.pins = 1
        at.hit = False
        at.writing = False
        at.failed_writes = 0
        place = _home(table, hashes[i])
        while table[place] != 0:
            place = (place + 1) & (table.size - 1)
        table[place] = row + 1
        region_used[row // per_region] += 1
        room[i] = _GRANTED
        picked[i] = row
    return count


@_jit
def publish(
    rows: Rows,
    ends: I32,
    region_stamp: I64,
    per_region: int,
    picked: I32,
    raw: U64,
    standing: int,
    stamp: int,
    visible: U8,
) -> int:
    """Make filling rows, in prefix order, ready. Returns how many; those doomed meanwhile stay as they are."""
    published = 0
    for i in range(len(picked) - 1, -1, -1):
        row = picked[i]
        if rows[row].state == _FILLING:
            rows[row].state = _READY
            rows[row].pins -= 1
            rows[row].raw = raw[i]
            rows[row].standing = standing
            rows[row].stamp = stamp
            _link_hottest(rows, ends, row)
            region_stamp[row // per_region] = stamp
            visible[i] = 1
            published += 1
    return published


@_jit
def detach(table: I32, rows: Rows, ends: I32, picked: I32) -> None:
    """Doom ready and filling rows: out of the table and of the order of use."""
    for i in range(len(picked)):
        row = picked[i]
        state = rows[row].state
        if state in (_READY, _FILLING):
            _forget(table, rows, row)
            if state == _READY:
                _unlink(rows, ends, row)
            rows[row].state = _DOOMED


@_jit
def unpin(rows: Rows, picked: I32) -> None:
    for i in range(len(picked)):
        rows[picked[i]].pins -= 1


@_jit
def free_doomed(rows: Rows, region_used: I32, per_region: int, free: I32, count: int, picked: I32) -> int:
    """Put doomed rows without pins on the stack `free[:count]`. Returns the new count.

    Last row first: rows that were freed together are then handed out in ascending order, and neighbours go to the drive in
    one request.
    """
    for i in range(len(picked) - 1, -1, -1):
        row = picked[i]
        if rows[row].state == _DOOMED and rows[row].pins == 0:
            rows[row].state = _FREE
            region_used[row // per_region] -= 1
            free[count] = row
            count += 1
    return count


@_jit
def coldest(rows: Rows, ends: I32, want: int, out: I32) -> int:
    """The coldest rows without pins, at most `want`, coldest first. Returns how many."""
    found = 0
    row = ends[0]
    while row >= 0 and found < want:
        if rows[row].pins == 0:
            out[found] = row
            found += 1
        row = rows[row].newer
    return found


@_jit
def coldest_dirty(rows: Rows, ends: I32, want: int, steps: int, out: I32) -> int:
    """The coldest dirty rows that nobody writes, at most `want`, among the `steps` coldest. Returns how many."""
    found = 0
    row = ends[0]
    while row >= 0 and found < want and steps > 0:
        if rows[row].standing == _DIRTY and not rows[row].writing:
            out[found] = row
            found += 1
        row = rows[row].newer
        steps -= 1
    return found

"""What a save does to the host cache and to the drive: one rule a policy, and no mechanism."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple


class WritePolicy(StrEnum):
    WRITE_THROUGH = "write_through"  # to the drive now, and the record stays warm
    WRITE_BACK = "write_back"  # to the drive when its slot is needed, at a flush, or at close
    WRITE_THROUGH_SELECTIVE = (
        "write_through_selective"  # to the drive at its second use, if it lives that long
    )
    NEVER = "never"  # to the drive now; saves do not take part in the host cache


class Standing(IntEnum):
    """What the drive has of a record in the host cache."""

    CLEAN = 0  # the drive has it too
    DIRTY = 1  # must be written before its slot is reused; losing it is counted
    TRIAL = 2  # may be dropped unwritten; a second use (a hit, or a save) makes it dirty


class SaveRule(NamedTuple):
    enters: Standing | None  # None: the save does not enter the host cache
    writes_now: bool  # whether the save itself writes to the drive


_RULES = {
    WritePolicy.WRITE_THROUGH: SaveRule(Standing.CLEAN, True),
    WritePolicy.WRITE_BACK: SaveRule(Standing.DIRTY, False),
    WritePolicy.WRITE_THROUGH_SELECTIVE: SaveRule(Standing.TRIAL, False),
    WritePolicy.NEVER: SaveRule(None, True),
}


def save_rule(policy: WritePolicy) -> SaveRule:
    """What a save does under a policy.

    Where `writes_now` is false, the caller still writes what the cache had no room for, and what is `due` after a call.
    """
    return _RULES[policy]

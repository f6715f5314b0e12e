"""Sizes in bytes as people write them: `4GiB`, `256MiB`, `1.5TB`, `4096`."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from gdsstore.errors import ArgumentError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BINARY = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "PiB": 1 << 50}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_FACTORS = {name.lower(): factor for name, factor in (_BINARY | _DECIMAL).items()}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) *([a-z]*)", re.ASCII)
_MAX_BYTES = (1 << 63) - 1  # what a file offset can hold


def parse_size(size: int | str) -> int:
    """Bytes of a size: a number of bytes, or a string with a unit (KiB, MiB, GiB, TiB, PiB; KB, MB, GB, TB, PB; B).

    A fraction is fine where it makes whole bytes (`1.5GiB`). Raises ArgumentError for anything else; a lone `G` too, which some
    programs read as 10^9 and some as 2^30.
    """
    nbytes = _parse_text(size) if isinstance(size, str) else _parse_number(size)
    if not 0 <= nbytes <= _MAX_BYTES:
        raise ArgumentError(f"a size is between 0 and 2^63 - 1 bytes, not {size}")
    return nbytes


def format_size(nbytes: int) -> str:
    """A size that `parse_size` reads back to exactly `nbytes`, in the largest binary unit that keeps it whole."""
    for unit in reversed(_BINARY):
        if nbytes and nbytes % _BINARY[unit] == 0:
            return f"{nbytes // _BINARY[unit]}{unit}"
    return f"{nbytes}B"


def _parse_number(size: object) -> int:
    # bool is an int to Python, but `capacity = true` is a mistake. operator.index lets numpy's integers in and floats not.
    if not isinstance(size, bool):
        try:
            return operator.index(size)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ArgumentError(f"a size is whole bytes or a string such as '4GiB', not {size!r}")


def _parse_text(size: str) -> int:
    match = _SIZE.fullmatch(size.strip().lower())
    if match is None:
        raise ArgumentError(f"{size!r} is not a size; write it like 4GiB, 256MiB or 4096")
    number, unit = match.groups()
    if unit in ("k", "m", "g", "t", "p"):
        letter = unit.upper()
        raise ArgumentError(f"{size!r} can mean two sizes; write {number}{letter}iB or {number}{letter}B")
    if unit and unit not in _FACTORS:
        raise ArgumentError(f"{size!r} has an unknown unit; known: {', '.join(_BINARY | _DECIMAL)}")
    nbytes = Fraction(number) * _FACTORS.get(unit, 1)
    if nbytes.denominator != 1:
        raise ArgumentError(f"{size!r} is not a whole number of bytes")
    return int(nbytes)

"""Numbers for people, each with its unit; `None` is what nobody knows."""

from __future__ import annotations

UNKNOWN = "-"


def size(nbytes: float | None) -> str:
    """Bytes in powers of 1000."""
    if nbytes is None:
        return UNKNOWN
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {units[0]}"


def speed(bytes_per_s: float | None) -> str:
    return UNKNOWN if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def span(seconds: float | None) -> str:
    """A length of time, from microseconds to days."""
    if seconds is None:
        return UNKNOWN
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e6:.0f} µs"

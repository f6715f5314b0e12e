"""Where pages were found, and why not."""

from __future__ import annotations

from typing import Any, Final

from gdsstore.observe.activity import HOST_MISSES, SHARED_MISSES, Moved

FROM: Final = "pages_loaded_from_"
MISS: Final = "pages_miss_"


def lookups(moved: Moved) -> dict[str, int]:
    return {"hits": moved.count("lookup_hits"), "misses": moved.count("lookup_misses")}


def outcomes(moved: Moved) -> dict[str, Any]:
    """Pages of all calls by outcome; `missed` and `failed` by reason. See PageStatus."""
    return {
        "saved": moved.count("pages_saved"),
        "already_there": moved.count("pages_already_there"),
        "loaded": moved.count("pages_loaded"),
        "missed": _by_reason(moved, MISS),
        "failed": _by_reason(moved, "pages_failed_"),
    }


def tiers(moved: Moved) -> list[dict[str, Any]]:
    """Hits, and misses by reason, of each tier, in the order in which loads ask them. What came from no other is the drives'."""
    above = {
        name.removeprefix(FROM): moved.count(name) for name in sorted(moved.pages) if name.startswith(FROM)
    }
    misses: dict[str, dict[str, int]] = {}
    for tier, name in (("host", HOST_MISSES), ("shared", SHARED_MISSES)):
        if name in moved.pages:
            above.setdefault(tier, 0)
            misses[tier] = {"absent": moved.count(name)}
    if refused := moved.count("shared_pages_refused"):
        misses.setdefault("shared", {})["checksum"] = refused
    found = [{"tier": tier, "hits": above[tier], "misses": misses.get(tier, {})} for tier in sorted(above)]
    rest = moved.count("pages_loaded") - sum(above.values())
    return [*found, {"tier": "drive", "hits": rest, "misses": _by_reason(moved, MISS)}]


def _by_reason(moved: Moved, prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): moved.count(name)
        for name in sorted(moved.pages)
        if name.startswith(prefix)
    }

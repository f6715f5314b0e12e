"""What a verification found."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What is damaged: a page (the first three) or a whole segment."""

    PAYLOAD = "payload"  # the bytes of a record do not have their checksum
    ENTRY = "entry"  # a table entry is damaged, or says something else than the catalog
    UNREADABLE = "unreadable"  # the drive answers with an error, or not at all; also of a whole segment
    SUPERBLOCK = "superblock"  # the segment's first block is damaged, or contradicts the catalog
    TRUNCATED = "truncated"
    MISSING = "missing"
    FOREIGN = "foreign"  # of another store, another segment, or a newer format


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged page, or one damaged segment (then `slot` is None)."""

    file: str
    segment: int
    kind: Kind
    what: str
    slot: int | None = None
    key: str | None = None  # hex; None where no whole entry tells it
    pages: int = 0  # pages that could be looked up and are affected; a leftover's is 0
    repaired: bool = False
    unsure: bool = (
        False  # could not be looked at, for a reason that may pass: no repair drops anything for it
    )


@dataclass(slots=True)
class Verification:
    """The outcome. Bytes are those of records, as read from the drive; times are seconds."""

    online: bool
    segments: int = 0  # files that were looked at
    pages_checked: int = 0
    bytes_checked: int = 0
    leftovers: int = 0  # whole entries that the catalog does not know: legal, and checked too; 0 offline
    reclaimed: int = (
        0  # segments that were given away again and again while they were being read: not checked
    )
    seconds: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    left_out: list[Damage] = field(
        default_factory=list
    )  # segments that the catalog gave up earlier; nothing reads them

    @property
    def gbps(self) -> float:
        """10^9 bytes of records a second, everything counted."""
        return self.bytes_checked / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def unrepaired(self) -> int:
        return sum(not damage.repaired for damage in self.damaged)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        kinds = Counter(damage.kind for damage in self.damaged if damage.slot is None)
        counts = {
            f"segments_{kind}": kinds[kind]
            for kind in (Kind.MISSING, Kind.TRUNCATED, Kind.FOREIGN, Kind.SUPERBLOCK)
        }
        return {
            "mode": "online" if self.online else "offline",
            "clean": not self.damaged,
            "segments": self.segments,
            **counts,
            "segments_reclaimed_meanwhile": self.reclaimed,
            "pages_checked": self.pages_checked,
            "bytes_checked": self.bytes_checked,
            "leftovers": self.leftovers,
            "damage_found": len(self.damaged),
            "damage_repaired": len(self.damaged) - self.unrepaired,
            "damaged": [asdict(damage) for damage in self.damaged],
            "left_out": [asdict(damage) for damage in self.left_out],
            "seconds": self.seconds,
            "gbps": self.gbps,
        }

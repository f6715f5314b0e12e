"""What a drill found, and what of it fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gdsstore.drill.plan import DEADLINE_S, DrillFault
from gdsstore.drill.traffic import Seen


@dataclass(slots=True)
class FaultReport:
    """One fault. Times in seconds; None where it does not apply or did not happen."""

    fault: DrillFault
    seconds: float = 0.0  # that all of it took
    seen: Seen = field(default_factory=Seen)
    injected: int = 0  # requests that the fault hit, or processes that were killed
    pages_lost: int = 0  # that were saved before the fault, and are not there after it
    left_alone_s: float | None = None  # from the fault to when the drive was given no more calls
    back_s: float | None = None  # from the end of the fault to when it was used again
    problems: list[str] = field(default_factory=list)  # beyond what `judge` sees

    @property
    def passed(self) -> bool:
        return not self.judge()

    def judge(self) -> list[str]:
        """What fails, in words; nothing for a fault that was gone through as promised."""
        seen = self.seen
        found = list(self.problems)
        if seen.wrong_pages:
            found.append(f"{seen.wrong_pages} pages were served with wrong bytes; is `verify` switched off?")
        if seen.late_calls:
            found.append(f"{seen.late_calls} calls ended after their deadline of {DEADLINE_S:g} s, or never")
        if self.pages_lost and self.fault is not DrillFault.CORRUPT:
            found.append(f"{self.pages_lost} pages that were saved are gone")
        if self.injected == 0:
            found.append("the fault hit nothing, so nothing was tried")
        found += [f"a call raised {error}" for error in seen.errors]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        seen = self.seen
        return {
            "fault": self.fault.value,
            "meaning": self.fault.meaning,
            "passed": self.passed,
            "problems": self.judge(),
            "wrong_pages": seen.wrong_pages,
            "late_calls": seen.late_calls,
            "longest_call_s": seen.longest_call_s,
            "calls": seen.calls,
            "pages_loaded": seen.pages_loaded,
            "pages_saved": seen.pages_saved,
            "pages_lost": self.pages_lost,
            "misses": _plain(seen.misses),
            "failed_saves": _plain(seen.failed_saves),
            "injected": self.injected,
            "left_alone_s": self.left_alone_s,
            "back_s": self.back_s,
            "seconds": self.seconds,
        }


def _plain(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))

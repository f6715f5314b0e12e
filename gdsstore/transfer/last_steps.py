"""What is left to do for pages that have arrived: small writes, which get a little time of their own beyond the deadline."""

from __future__ import annotations

from dataclasses import dataclass

from gdsstore.waiting import Deadline

LAST_STEP_S = 0.25  # enough where nothing hangs


@dataclass(frozen=True, slots=True)
class LastSteps:
    """Until when each of the steps is waited for: one after the other, so that what hangs in one leaves time for the pages of other
    drives in the next."""

    entered: Deadline  # their entries are in the record tables
    durable: Deadline  # with durability = commit
    visible: Deadline  # in the catalog

    @classmethod
    def after(cls, deadline: Deadline) -> LastSteps:
        left_s = deadline.left_s
        return cls(*(Deadline(left_s + step * LAST_STEP_S) for step in (1, 2, 3)))

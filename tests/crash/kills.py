"""When a worker is killed: some time after it came to a phase, at random."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from tests.crash.processes import Worker

# Phase, how often it is chosen, and the seconds after it within which the kill falls.
MOMENTS = (
    ("opening", 0.25, 0.06),  # looking at the catalog, rebuilding it, making the first segment
    ("opened", 0.1, 0.1),  # checking
    ("busy", 0.5, 0.25),
    ("closing", 0.15, 0.02),
)


@dataclass(frozen=True, slots=True)
class Kill:
    phase: str
    delay_s: float

    @classmethod
    def draw(cls, rng: random.Random) -> Kill:
        phase, _, within_s = rng.choices(MOMENTS, [weight for _, weight, _ in MOMENTS])[0]
        return cls(phase, rng.uniform(0, within_s))

    def do(self, worker: Worker, journal: Path) -> bool:
        """Kill the worker at that moment; whether it was alive then."""
        if not worker.wait_for_phase(journal, self.phase):
            return False
        time.sleep(self.delay_s)
        worker.kill()
        return worker.wait() < 0

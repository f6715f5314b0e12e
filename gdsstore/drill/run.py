"""Goes through the faults of a drill, each with a store of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from gdsstore.drill.kill import kill_and_reopen
from gdsstore.drill.plan import DrillFault, DrillPlan, scratch
from gdsstore.drill.report import FaultReport
from gdsstore.drill.sickness import fall_ill
from gdsstore.replay.worker import compile_checks

Say = Callable[[str], None]


def drill(plan: DrillPlan, say: Say = lambda what: None) -> list[FaultReport]:
    """Go through the plan's faults in a new folder, which is removed in the end. `say` is told what is being done.

    What fails is in the reports. Raises ArgumentError and StoreError where the drill cannot be held here, and what
    `gdsstore.open` raises.
    """
    compile_checks()
    with scratch(plan.directory) as folder:
        return [_one(folder / fault.value, fault, plan.seconds, say) for fault in plan.faults]


def _one(path: Path, fault: DrillFault, seconds: float, say: Say) -> FaultReport:
    say(f"{fault}: {fault.meaning}")
    try:
        return kill_and_reopen(path, seconds) if fault is DrillFault.KILL else fall_ill(path, fault, seconds)
    finally:
        shutil.rmtree(path, ignore_errors=True)  # the next store needs the room

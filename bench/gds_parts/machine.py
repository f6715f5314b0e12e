"""The machine that the numbers are of."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdsstore.probe.facts import MachineFacts
from gdsstore.probe.gather import gather
from gdsstore.probe.summary import about


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cpus: int
    python: str
    facts: MachineFacts

    @property
    def gpu_name(self) -> str:
        gpus = self.facts.nvidia.gpus
        return (gpus[0].name if gpus else None) or "a GPU of unknown name"

    @property
    def drive(self) -> str:
        """Filesystem and drives, in words."""
        drives = [drive.model or f"{drive.name} ({drive.kind})" for drive in self.facts.storage.drives]
        where = f" on {', '.join(drives)}" if drives else ""
        return f"{self.facts.storage.fs_type or 'unknown filesystem'}{where}"

    def lines(self) -> list[tuple[str, str]]:
        """Name and value, for people."""
        return [("CPU", f"{self.cpu}, {self.cpus} usable"), ("Python", self.python), *about(self.facts)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cpu": self.cpu,
            "cpus": self.cpus,
            "python": self.python,
            "drive": self.drive,
            "facts": self.facts.to_dict(),
        }


def this_machine(directory: Path) -> Machine:
    """`directory`: on the drive in question. Never raises: what cannot be read is a note in the facts."""
    cpus = len(os.sched_getaffinity(0))
    return Machine(_cpu_model(), cpus, platform.python_version(), gather(directory.resolve()))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

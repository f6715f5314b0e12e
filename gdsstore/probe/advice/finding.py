"""What was found out about a machine: which path it concerns, what it costs, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from gdsstore.probe.facts import MachineFacts
from gdsstore.probe.trips import IoPath as IoPath


class Route(StrEnum):
    """The two ways in which cuFile goes direct on NVMe. Either will do."""

    P2PDMA = "p2pdma"  # the kernel's peer-to-peer DMA, no extra module
    NVIDIA_FS = "nvidia-fs"  # NVIDIA's module, with an NVMe driver patched for it


class Severity(StrEnum):
    BLOCKS = "blocks"
    MAY_BLOCK = "may block"  # nobody can tell before it is tried
    COSTS = "costs"
    HINT = "hint"


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` names the finding for programs. `route`: it stops only this way of going direct. `see`: public reports of it.

    `dead_end`: no setting mends it on this machine, so that what else is missing on the way does not matter.
    """

    code: str
    severity: Severity
    path: IoPath
    title: str
    cost: str
    next_step: str
    see: tuple[str, ...] = ()
    route: Route | None = None
    dead_end: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "see": list(self.see)}


Rule: TypeAlias = Callable[[MachineFacts], Iterator[Finding]]

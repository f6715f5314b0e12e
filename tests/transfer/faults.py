"""Short ways to say what shall go wrong."""

from __future__ import annotations

from typing import Any

from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine


def faulty(*faults: Fault, seed: int = 0) -> FaultyEngine:
    return FaultyEngine(PosixEngine(2), faults, seed)


def fault(kind: FaultKind, probability: float = 1.0, **more: Any) -> Fault:
    return Fault(kind, probability=probability, **more)

"""Short ways to say what shall go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine

T = TypeVar("T")
PATIENCE_S = 60.0


def faulty(*faults: Fault, seed: int = 0) -> FaultyEngine:
    return FaultyEngine(PosixEngine(2), faults, seed)


def fault(kind: FaultKind, probability: float = 1.0, **more: Any) -> Fault:
    return Fault(kind, probability=probability, **more)


def reaching(engine: FaultyEngine, call: Callable[[], T]) -> T:
    """What a call gives that hangs in the drive. On a busy machine its time may be over before it gets there, and then it hangs
    nowhere: it is made again."""
    end = time.monotonic() + PATIENCE_S
    hung = engine.injected["hang"]
    while True:
        result = call()
        if engine.injected["hang"] > hung:
            return result
        assert time.monotonic() < end, "no call reached the drive in time"

"""What a replay is asked to do, in a form that crosses to its worker processes as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdsstore.errors import ArgumentError
from gdsstore.replay.requests import Workload
from gdsstore.replay.traces import open_trace
from gdsstore.replay.workload import MultiTurn

MODEL = "replay"  # the namespace's model: pages of one size are shared by all replays on a store


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """A replay. Raises ArgumentError for numbers that make none."""

    stores: tuple[str, ...]  # directories, one a volume
    page_bytes: int
    trace: str | None = None  # a file; None: the workload of our own
    capacity: int | None = None  # bytes; None: what the store has
    requests: int | None = None  # at most so many; None: all
    skip: int = 0  # requests at the trace's start that are passed over
    processes: int = 1
    faults: str | None = None  # a specification for engines.faulty
    seed: int = 0  # of the workload of our own and of the faults
    settings: dict[str, Any] = field(default_factory=dict)  # further settings of the store

    def __post_init__(self) -> None:
        if not self.stores:
            raise ArgumentError("a replay needs at least one store directory")
        least = {"page_bytes": 1, "processes": 1, "skip": 0, "seed": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ArgumentError(f"{name} must be at least {lowest}", given=getattr(self, name))
        if self.requests is not None and self.requests < 1:
            raise ArgumentError("requests must be at least 1", given=self.requests)

    def workload(self) -> Workload:
        """Raises ArgumentError if the trace cannot be read."""
        return MultiTurn(seed=self.seed) if self.trace is None else open_trace(Path(self.trace))

    def store_settings(self) -> dict[str, Any]:
        """Settings for `gdsstore.open`."""
        # At full speed the store can turn over within the default grace of 30 s, and nothing be reclaimed.
        return {"grace_s": 0.0, **self.settings}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ReplayPlan:
        fields = json.loads(text)
        return cls(**{**fields, "stores": tuple(fields["stores"])})

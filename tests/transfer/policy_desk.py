"""Short ways to talk to a transfer policy."""

from __future__ import annotations

from gdsstore.engines.base import Op
from gdsstore.transfer.policy import NO_KEYS, TransferPolicy
from gdsstore.transfer.policy_terms import (
    Ask,
    Caps,
    Cost,
    Limits,
    Request,
    TransferClass,
    Units,
)

LOAD, PREFETCH, OFFLOAD, MAINTENANCE = TransferClass
READ, WRITE = Op.READ, Op.WRITE
LATER = 1000.0


TEN_BYTES = Caps(10, 4)


class Desk:
    """A policy, and a clock that stands where `now` says."""

    def __init__(self, caps: Caps = TEN_BYTES, volumes: int = 2, **limits: float) -> None:
        self.limits = Limits(**limits)  # type: ignore[arg-type]
        self.policy = TransferPolicy(self.limits, [caps] * volumes)
        self.now = 0.0

    def submit(
        self,
        cls: TransferClass = LOAD,
        *,
        keys: str = "",
        deadline: float = LATER,
        nbytes: int = 1,
        priority: int = 0,
    ) -> Request:
        op = WRITE if cls is OFFLOAD else READ
        return self.policy.submit(cls, op, nbytes, deadline, self.now, frozenset(keys) or NO_KEYS, priority)

    def start(self) -> Request | None:
        return self.policy.start(self.now)

    def starts(self) -> list[Request]:
        return list(iter(self.start, None))

    def finish(self, *requests: Request) -> None:
        for request in requests:
            self.policy.finish(request, self.now)

    def run(
        self, cls: TransferClass = LOAD, *, op: Op | None = None, deadline: float = LATER, nbytes: int = 1
    ) -> Request:
        """A request that runs."""
        chosen = op or (WRITE if cls is OFFLOAD else READ)
        request = self.policy.submit(cls, chosen, nbytes, deadline, self.now)
        assert self.start() is request
        return request

    def ask(self, request: Request, nbytes: int, *volumes: int, ops: int = 1) -> Ask:
        units: Units = {volume: Cost(nbytes, ops) for volume in volumes or (0,)}
        return self.policy.ask(request, units, self.now)

    def done(self, ask: Ask) -> list[Ask]:
        """Give a chunk back; the asks that were granted because of it."""
        self.policy.decided.clear()
        self.policy.done(ask, self.now)
        return list(self.policy.decided)

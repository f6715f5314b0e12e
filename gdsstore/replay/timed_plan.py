"""What a replay with time is asked to do: which requests, how fast they come, and how fast they are computed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from gdsstore.errors import ArgumentError
from gdsstore.replay.plan import ReplayPlan
from gdsstore.replay.requests import portion
from gdsstore.replay.truth import KEY_BYTES, U8, PageKeys

DEFAULT_REQUESTS = 200
# Without a rate, the requests take that share of the time to compute: busy enough that some queue, and none waits for ever.
DEFAULT_LOAD = 0.7


class Variant(StrEnum):
    """What the modelled server has."""

    NO_STORE = "no store"  # every prompt is computed
    STORE = "store"  # hits are loaded when it is the request's turn
    PREFETCH = "prefetch"  # hits are loaded from the request's arrival on
    COST = "prefetch, cost model"  # the same, as far as that is faster than computing


@dataclass(frozen=True, slots=True, eq=False)
class TimedRequest:
    """One request as it is replayed. `keys`: uint8[n, 32], of the prompt's blocks."""

    arrival_s: float  # on the replay's clock, which starts at 0
    input_tokens: int
    keys: U8


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """A replay with time. Raises ArgumentError for numbers that make none."""

    replay: ReplayPlan
    seconds: float = 30.0  # in which the requests arrive
    scale: float | None = (
        None  # the trace's seconds in one of ours; None: so that the requests fit into `seconds`
    )
    prefill_tokens_s: float | None = None  # None: from DEFAULT_LOAD
    throttle_bytes_s: float | None = None  # the drive's rate in each direction; None: as fast as it is

    def __post_init__(self) -> None:
        for name in ("seconds", "scale", "prefill_tokens_s", "throttle_bytes_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ArgumentError(f"{name} must be above 0", given=value)
        if self.replay.processes != 1 or self.replay.faults is not None:
            raise ArgumentError("a replay with time runs in one process, and without injected faults")

    def schedule(self) -> Schedule:
        """The requests on the replay's clock. Raises ArgumentError where the trace cannot be read or has none."""
        workload = self.replay.workload()
        limit = self.replay.requests
        if limit is None and self.scale is None:
            limit = DEFAULT_REQUESTS
        keys = PageKeys()
        before = {
            key.tobytes()
            for request in portion(workload, 0, self.replay.skip)
            for key in keys.of(request.blocks, request.session)
        }
        asked = portion(workload, self.replay.skip, limit)
        first = next(asked, None)
        if first is None:
            raise ArgumentError("the trace has no request there; skip fewer", skip=self.replay.skip)
        chosen, start_s = [first], first.arrival_s
        if self.scale is None:
            chosen += asked
            scale = (chosen[-1].arrival_s - start_s) / self.seconds or 1.0
        else:
            scale = self.scale
            end_s = start_s + scale * self.seconds
            chosen += itertools.takewhile(lambda request: request.arrival_s <= end_s, asked)
        tokens = sum(max(1, request.input_tokens) for request in chosen)
        rate = self.prefill_tokens_s or tokens / (DEFAULT_LOAD * self.seconds)
        requests = [
            TimedRequest(
                (request.arrival_s - start_s) / scale,
                max(1, request.input_tokens),
                keys.of(request.blocks, request.session),
            )
            for request in chosen
        ]
        wanted = dict.fromkeys(key.tobytes() for request in requests for key in request.keys)
        there = b"".join(key for key in wanted if key in before)
        return Schedule(
            name=workload.name,
            requests=requests,
            unique_pages=len(wanted),
            there=np.frombuffer(there, np.uint8).reshape(-1, KEY_BYTES),
            block_tokens=workload.block_tokens,
            scale=scale,
            prefill_tokens_s=rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Requests in order of arrival, and the speed at which they are computed."""

    name: str
    requests: list[TimedRequest]
    unique_pages: int
    there: U8  # uint8[n, 32], keys of these pages that the skipped requests had too: stored before the first one comes
    block_tokens: int
    scale: float
    prefill_tokens_s: float

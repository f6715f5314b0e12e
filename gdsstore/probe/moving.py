"""One transfer of a round trip, through an engine: all of some memory, in ranges of RANGE_BYTES."""

from __future__ import annotations

import os
import time

import numpy as np

from gdsstore.engines.base import Engine, Op, RangePlan
from gdsstore.errors import EngineError
from gdsstore.sizes import MiB

RANGE_BYTES = MiB
NOT_SAME = "what was read back is not what was written"


class EndedError(EngineError):
    """A transfer ended and did not move everything: nothing is under way any more."""


class HungError(EngineError):
    """A transfer did not end in time: the memory and the file may still be in use."""


def move(engine: Engine, op: Op, fd: int, address: int, nbytes: int, deadline_s: float) -> float:
    """Seconds to move `nbytes` bytes at `address` from or to the file's beginning. Raises EndedError, HungError."""
    offset = np.arange(0, nbytes, RANGE_BYTES, dtype=np.int64)
    length = np.minimum(RANGE_BYTES, nbytes - offset)
    memory = np.uint64(address) + offset.astype(np.uint64)
    plan = RangePlan(np.full(len(offset), fd, np.int32), offset, memory, length)
    start = time.perf_counter()
    transfer = engine.submit(op, plan)
    results = transfer.wait(deadline_s)
    seconds = time.perf_counter() - start
    bad = np.flatnonzero(~results.complete(plan))
    if len(bad):
        code = int(results.errno[bad[0]])
        kind = EndedError if transfer.done else HungError
        raise kind(
            f"{len(bad)} of {len(plan)} ranges failed to {op.value}: {os.strerror(code) if code else 'short'}",
            engine=engine.name,
        )
    return seconds

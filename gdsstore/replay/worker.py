"""One worker: opens the store, replays its share of the requests, and tells what it saw.

Run as a program it is one of several worker processes: plan as JSON on standard input, answers as JSON lines
on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

import gdsstore
from gdsstore.engines.choose import make_engine
from gdsstore.engines.faulty import FaultyEngine, parse_faults
from gdsstore.errors import GdsStoreError
from gdsstore.replay.plan import MODEL, ReplayPlan
from gdsstore.replay.replayer import Replayer, Tally
from gdsstore.replay.requests import portion, share
from gdsstore.replay.truth import U8, count_wrong, fill_pages

BUFFER_BYTES = 64 << 20
FAULTY_DEADLINE_S = 2.0
_REPORT_EVERY_S = 0.2

OnStep = Callable[[int], None]
"""Called often, with the number of requests done so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """What one worker saw. Clock times are `time.monotonic()`, which all processes of a machine share."""

    tally: Tally
    began_s: float
    ended_s: float
    cpu_s: float  # of the whole process, between the two
    drive_bytes_read: int
    drive_bytes_written: int
    engine: str
    capacity_bytes: int
    faults: dict[str, int]  # ranges hit, by kind

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return {**_shallow(self), "tally": _shallow(self.tally)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WorkerResult:
        tally = values["tally"]
        counters = {name: Counter(tally[name]) for name in ("misses", "saves")}
        return cls(**{**values, "tally": Tally(**{**tally, **counters})})


def _shallow(record: WorkerResult | Tally) -> dict[str, Any]:
    # Not asdict, which takes a Counter apart wrongly.
    return {field.name: getattr(record, field.name) for field in fields(record)}


def open_store(plan: ReplayPlan, faulty: FaultyEngine | None = None) -> gdsstore.Store:
    """The plan's store, made if there is none. Raises what `gdsstore.open` raises."""
    return gdsstore.open(plan.stores, config=_config(plan), engine=faulty)


def run_worker(plan: ReplayPlan, worker: int, on_step: OnStep) -> WorkerResult:
    """Replay worker `worker`'s share of the plan. Raises GdsStoreError of all kinds."""
    compile_checks()
    faulty = _faulty_engine(plan, worker)
    with open_store(plan, faulty) as store:
        rows = max(1, BUFFER_BYTES // plan.page_bytes)

        def new_buffer() -> U8:
            arena = store.arena(rows * plan.page_bytes)  # the array keeps it mapped
            return arena.array[: rows * plan.page_bytes].reshape(rows, plan.page_bytes)

        def step() -> None:
            if faulty is not None:
                # What hung comes late, then, into memory that must not be in use again; and nothing piles up.
                faulty.release_hangs()
            on_step(replayer.tally.requests)

        namespace = store.namespace(model=MODEL, layout=gdsstore.PageLayout.opaque(plan.page_bytes))
        replayer = Replayer(namespace, new_buffer, deadline_s=4 * store.config.io_deadline_s)
        requests = share(portion(plan.workload(), plan.skip, plan.requests), worker, plan.processes)
        store.moving()  # starting the engine is no part of the first save
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        replayer.run(requests, step)
        ended_s, ended_cpu_s = time.monotonic(), time.process_time()
        stats = store.stats()
        return WorkerResult(
            tally=replayer.tally,
            began_s=began_s,
            ended_s=ended_s,
            cpu_s=ended_cpu_s - began_cpu_s,
            drive_bytes_read=stats.get("drive_bytes_read", 0),
            drive_bytes_written=stats.get("drive_bytes_written", 0),
            engine=stats["engine"] or "none",
            capacity_bytes=stats["capacity_bytes"],
            faults=faulty.injected if faulty is not None else {},
        )


def _config(plan: ReplayPlan) -> gdsstore.Config:
    settings = plan.store_settings()
    if plan.faults is not None:
        # A range that hangs costs a deadline each time, and the default one is for drives that mean well.
        settings.setdefault("io_deadline_s", FAULTY_DEADLINE_S)
    return gdsstore.Config.load(capacity=plan.capacity, **settings)


def _faulty_engine(plan: ReplayPlan, worker: int) -> FaultyEngine | None:
    """The configured engine, with the plan's faults. Raises ConfigError for faults that cannot be read."""
    if plan.faults is None:
        return None
    faults = parse_faults(plan.faults)
    config = _config(plan)
    inner = make_engine(
        config.engine, posix_threads=config.posix_threads, in_flight_ranges=config.in_flight_ranges
    )
    return FaultyEngine(inner, faults, seed=plan.seed + worker)


def compile_checks() -> None:
    """Have numba compile, or fetch from its cache, what would otherwise count as the replay's first steps."""
    keys, pages = np.zeros((1, 32), np.uint8), np.zeros((1, 8), np.uint8)
    fill_pages(keys, pages)
    count_wrong(keys, pages)


def main() -> int:
    """Entry of a worker process; the argument is the worker's number."""
    # The channel moves off fd 1, so that what some C library prints there cannot pass for an answer.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    plan = ReplayPlan.from_json(sys.stdin.buffer.read())
    last_s = 0.0

    def tell(done: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _REPORT_EVERY_S:
            last_s = time.monotonic()
            channel.write(
                json.dumps({"done": done}) + "\n"
            )  # ends this process by EPIPE if the parent is gone

    try:
        result = run_worker(plan, int(sys.argv[1]), tell)
        channel.write(json.dumps({"result": result.to_dict()}) + "\n")
    except GdsStoreError as error:
        channel.write(json.dumps({"error": str(error), "kind": type(error).__name__}) + "\n")
        return 1
    except (BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or going
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

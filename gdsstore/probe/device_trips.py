"""Round trips with GPU memory, each in a process that is killed in time, and by which path the bytes really went.

Engines count a byte as direct where they see nothing that speaks against it; cuFile can leave the direct path without a word.
So it is first forbidden to: what works then, and is counted as direct, was direct. What works only when it is allowed was not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gdsstore.errors import from_os_error
from gdsstore.probe.child import Said, ask
from gdsstore.probe.derived import allows_compat, forces_compat, why_no_gpu
from gdsstore.probe.device_trip import Job
from gdsstore.probe.facts import MachineFacts, build
from gdsstore.probe.trips import IoPath, Outcome, Trip
from gdsstore.sizes import MiB

CUFILE_ENGINES = ("kvikio", "nixl-gds-mt")
ENGINES = (*CUFILE_ENGINES, "bounce")
TOTAL_BYTES = 64 * MiB
DEADLINE_S = 15.0  # for each transfer
PROCESS_S = 60.0  # for all of one engine; a machine with many GPUs takes long to start CUDA
DEVICE = 0  # CUDA_VISIBLE_DEVICES says which GPU that is

_STRICT = {"CUFILE_ALLOW_COMPAT_MODE": "false"}


def device_round_trip(engine: str, directory: Path, facts: MachineFacts) -> Trip | None:
    """An engine's round trip over a file in `directory`, gone afterwards; None where there is no GPU to try it with.

    Never raises what the library raises on purpose. Ends after at most twice PROCESS_S.
    """
    driver = facts.cufile.driver
    if why_no_gpu(facts) is not None:
        return None
    if engine in CUFILE_ENGINES and driver is not None and driver.hung:
        return Trip(engine, Outcome.FAILED, f"not tried: {driver.error}", device=DEVICE)
    try:
        with _file(directory) as file:
            job = Job(engine, DEVICE, str(file), TOTAL_BYTES, bool(facts.storage.o_direct), DEADLINE_S)
            if engine not in CUFILE_ENGINES:
                return _attempt(job).trip
            return _by_which_path(job, may_be_direct=not forces_compat(facts), falls=allows_compat(facts))
    except OSError as error:
        return Trip(engine, Outcome.FAILED, str(from_os_error(error, "it failed")), device=DEVICE)


@dataclass(frozen=True, slots=True)
class _Attempt:
    trip: Trip
    hung: bool


def _by_which_path(job: Job, *, may_be_direct: bool, falls: bool) -> Trip:
    """`may_be_direct`: cuFile is not told to fall back always. `falls`: it is allowed to."""
    if not may_be_direct:
        return _fallen(_attempt(job).trip, "cuFile is told to fall back always (force_compat_mode)")
    strict = _attempt(job, **_STRICT)
    if strict.trip.works and not (strict.trip.path is IoPath.DIRECT and job.o_direct):
        return _fallen(
            strict.trip, "direct I/O is refused" if not job.o_direct else "cuFile has no direct route to NVMe"
        )
    if strict.trip.outcome is not Outcome.FAILED or strict.hung or not falls:
        return strict.trip
    allowed = _attempt(job).trip
    return _fallen(allowed, f"direct was refused: {strict.trip.detail}") if allowed.works else strict.trip


def _fallen(trip: Trip, why: str) -> Trip:
    """cuFile fell back, whatever the engine counted."""
    return replace(trip, path=IoPath.COMPAT, detail=why) if trip.works else trip


def _attempt(job: Job, **environ: str) -> _Attempt:
    said = ask(
        ["-m", "gdsstore.probe.device_trip", json.dumps(asdict(job))],
        PROCESS_S,
        {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **environ},
    )
    answer: dict[str, Any] = said.answer or {}
    if "trip" in answer:
        return _Attempt(_with_log(build(Trip, answer["trip"], "trip"), said), bool(answer.get("hung")))
    stage = answer.get("stage", "its start")
    ended = (
        f"it did not end within {PROCESS_S:.0f} s, and was killed"
        if said.exit_code is None
        else f"its process died (exit code {said.exit_code})"
    )
    trip = Trip(job.engine, Outcome.FAILED, f"{ended}, during {stage}", device=job.device)
    return _Attempt(_with_log(trip, said), said.exit_code is None)


def _with_log(trip: Trip, said: Said) -> Trip:
    if said.refused is None or trip.outcome is not Outcome.FAILED:
        return trip
    return replace(trip, detail=f"{trip.detail} (cufile.log: {said.refused})")


@contextmanager
def _file(directory: Path) -> Iterator[Path]:
    """A file with TOTAL_BYTES bytes on the drive: what was never written is refused, or slow, on the direct path.

    It has a name, as files of a store have: cuFile looks at more than the descriptor.
    """
    fd, name = tempfile.mkstemp(prefix=".gdsstore-doctor-", dir=directory)
    try:
        with open(fd, "wb", buffering=0) as file:
            for _ in range(TOTAL_BYTES // MiB):
                file.write(bytes(MiB))
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        os.unlink(name)

"""The stores of these tests, and the specs of the workers that use them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.crash.journal import read_ledger
from tests.crash.processes import Worker, Zygote
from tests.crash.worker import Spec

MiB = 1 << 20
LARGE: dict[str, Any] = {
    "capacity": 192 * MiB,
    "segment_bytes": MiB,
    "staging_bytes": 4 * MiB,
    "chunk_bytes": MiB,
    "catalog_map_bytes": 16 * MiB,
    "posix_threads": 2,
    "grace_s": 0.0,
    "maintain_interval_s": 0.01,
    "sync_interval_s": 0.05,
}
"""Never reclaims what a row of workers writes into it."""

SMALL = LARGE | {"capacity": 14 * MiB, "free_segments": 2}
"""Reclaims all the time."""

PAGES_A_LIFE = 250  # 4.5 MiB: a row of kills fits into a large store


def first_spec(place: Path, seed: int, **changes: Any) -> Spec:
    """A spec for a store under `place`, beside its journal."""
    spec = Spec(
        store=str(place / "store"), journal=str(place / "journal"), seed=seed, opens=50, calls_per_open=30
    )
    return replace(spec, **changes)


def start(zygote: Zygote, spec: Spec) -> Worker:
    return zygote.spawn("live", asdict(spec), Path(spec.journal).with_name("stderr"))


def run(zygote: Zygote, spec: Spec) -> Worker:
    """A life to its end."""
    worker = start(zygote, spec)
    worker.wait()
    return worker


def blame(spec: Spec, worker: Worker) -> str:
    """What to print when a worker did not do what it should."""
    return f"seed {spec.seed}, {read_ledger(Path(spec.journal)).failures}, {worker.complaint()}"

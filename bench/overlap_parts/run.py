"""The whole benchmark: one store, whose pages are loaded to host memory here and to GPU memory in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from gds_parts.gpu import SIMULATOR_ENVIRONMENT, Gpu, has_simulator, real_gpu, simulated_gpu
from gds_parts.machine import this_machine

from gdsstore.bound import BoundNamespace
from gdsstore.config import Config
from gdsstore.engines.routes import PathSetting
from gdsstore.errors import DeviceError, EngineError, GdsStoreError
from gdsstore.replay.truth import fill_pages
from gdsstore.sizes import GiB
from gdsstore.store import Store
from overlap_parts.destinations import U8, Destination, DeviceDestination, HostDestination
from overlap_parts.rounds import LIMIT, measure
from overlap_parts.sizes import LAYOUT, SEGMENT_BYTES, Sizes

SCHEMA, SCHEMA_VERSION = "gdsstore.bench.overlap", 1
FILL_PAGES = 64  # at a time: truth is made in memory of its own
CHILD_S = 3600.0
PATHS = (PathSetting.DIRECT, PathSetting.BOUNCE)  # to the GPU

NOTES = (
    "the forward is a thread that waits for each layer and then sleeps for as long as it takes; factor: its time by the I/O's",
    "io_s: a plain load of the same pages into the same memory, just before; forward_s: the forward alone, just before",
    "first_group_s: from the call until the first layers are there; ratio: (total - first group) / max(I/O, forward), the median "
    f"of the rounds' own; meets: at most {LIMIT}",
    "all loads are verified, all I/O is O_DIRECT; before each size, every byte of a layer-wise load is compared",
    "on the simulated GPU device memory is host memory, and copies and checksums are the CPU's: it shows that loads overlap, not "
    "how fast they are",
)

Say = Callable[[str], None]


def run(directory: Path, sizes: Sizes, arguments: Sequence[str], say: Say, root: Path) -> dict[str, Any]:
    """Measure in `directory`, which the caller removes. `arguments`: of Python, for this bench again, in a process for the device.

    Raises GdsStoreError, also for a page that is missing or wrong.
    """
    say("saving pages")
    count = max(sizes.pages)
    with _store(directory, count) as store:
        store.preallocate(count * LAYOUT.page_bytes * 5 // 4)
        destination = HostDestination(store, count)
        try:
            _save(_namespace(store), destination.memory)
            rows = _rows(_namespace(store), destination, sizes.pages, sizes, say)
        finally:
            destination.close()
    say("device")
    gpu = real_gpu()
    if gpu.kind == "none" and has_simulator(root):
        gpu = Gpu("simulated", gpu.why)
    missing = [gpu.why] if gpu.kind == "none" else []
    if not missing:
        simulated = gpu.kind == "simulated"
        found = _in_child([*arguments, "--device", str(directory), *(["--simulated"] if simulated else [])])
        rows, missing = rows + found["rows"], found["missing"]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(directory).to_dict(),
        "gpu": asdict(gpu),
        "device_missing": missing,
        "page_bytes": LAYOUT.page_bytes,
        "layers": LAYOUT.layers,
        "parameters": asdict(sizes),
        "limit": LIMIT,
        "rows": rows,
        "notes": list(NOTES),
    }


def run_device(directory: Path, sizes: Sizes, simulated: bool, say: Say) -> dict[str, Any]:
    """The rows of the device, with the pages that are in the store already. Made for a process in which nothing else was loaded."""
    gpu = simulated_gpu() if simulated else real_gpu()
    if gpu.kind == "none":
        return {"rows": [], "missing": [gpu.why]}
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for path in PATHS:
        try:
            rows += _device_rows(directory, sizes, path, say)
        except (DeviceError, EngineError) as error:
            missing.append(f"{path}: {error}")
    return {"rows": rows, "missing": missing}


def _device_rows(directory: Path, sizes: Sizes, path: PathSetting, say: Say) -> list[dict[str, Any]]:
    pages = sizes.bounce_pages if path is PathSetting.BOUNCE else sizes.pages
    destination = DeviceDestination(max(pages), path)
    try:
        with _store(directory, max(sizes.pages), path) as store:
            return _rows(_namespace(store), destination, pages, sizes, say)
    finally:
        destination.close()


def _store(directory: Path, count: int, path: PathSetting = PathSetting.AUTO) -> Store:
    capacity = count * LAYOUT.page_bytes * 5 // 4 + GiB
    return Store(
        directory / "store",
        Config.load(capacity=capacity, segment_bytes=SEGMENT_BYTES, measure_s=0.0, path=path),
    )


def _namespace(store: Store) -> BoundNamespace:
    return store.namespace(model="overlap", layout=LAYOUT)


def _keys(count: int) -> U8:
    return np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)


def _save(namespace: BoundNamespace, memory: U8) -> None:
    keys = _keys(len(memory))
    for start in range(0, len(memory), FILL_PAGES):
        part = slice(start, start + FILL_PAGES)
        fill_pages(keys[part], memory[part])
    result = namespace.save(keys, memory).result()
    if not result.all_ok:
        raise GdsStoreError(f"the bench could not save its pages: {result.reasons()}")


def _rows(
    namespace: BoundNamespace, destination: Destination, pages: Sequence[int], sizes: Sizes, say: Say
) -> list[dict[str, Any]]:
    keys = _keys(max(sizes.pages))
    rows = []
    for count in pages:
        say(f"{destination.name}, {count} pages")
        rows += measure(namespace, destination, keys[:count], sizes.factors, sizes.rounds)
    return [asdict(row) for row in rows]


def _in_child(command: Sequence[str]) -> dict[str, Any]:
    """What this bench, started again, writes to standard output. Raises GdsStoreError where it fails."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, **SIMULATOR_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GdsStoreError("the process for the device did not end in time") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise GdsStoreError(f"the process for the device failed: {said[-1] if said else done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found

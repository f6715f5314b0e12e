"""Save and load through the public API, verified, against the raw ceiling; round by round in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.bench.ceiling import RawNixl
from gdsstore.bound import BoundNamespace
from gdsstore.config import Config
from gdsstore.engines.base import Op
from gdsstore.errors import GdsStoreError
from gdsstore.layout import PageLayout
from gdsstore.memory.arena import Arena
from gdsstore.replay.truth import count_wrong, fill_pages
from gdsstore.store import Store
from gdsstore.transfer.results import SaveResult

RECORD_BYTES = (256 << 10, 1 << 20, 4 << 20)
SEGMENT_BYTES = (
    256 << 20
)  # what a store of a real size has; one as small as the bench's would get smaller ones
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. `ratio` is the median of the rounds' own ratios, since the drive drifts between rounds."""

    record_bytes: int
    direction: str
    gbps: float
    ceiling_gbps: float
    ratio: float
    cpu_s_per_gb: float
    fio_gbps: float | None
    rounds: int


@dataclass(slots=True)
class _Samples:
    ours: list[float]
    raw: list[float]
    cpu: list[float]


def bench_host(
    directory: Path, *, quick: bool, config: Config | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Run it in `directory` (which must be on the drive in question). Raises GdsStoreError on a wrong or missing page."""
    rounds, batch_bytes = (5, 256 << 20) if quick else (11, 512 << 20)
    rng = np.random.default_rng(1)
    config = config or Config.load(capacity=16 * batch_bytes, segment_bytes=SEGMENT_BYTES, grace_s=0.0)
    rows: list[Row] = []
    with Store(directory / "store", config) as store:
        arena = store.arena(batch_bytes)
        store.preallocate()
        with RawNixl(directory / "raw", arena, max(4 * batch_bytes, 1 << 30)) as raw:
            for record in RECORD_BYTES:
                if progress is not None:
                    progress(f"{record >> 10} KiB")
                rows += _one_size(store, arena, raw, record, batch_bytes // record, rounds, rng)
            engine = store.stats()["engine"]
        grant = arena.grant
        arena.close(10.0)
    return {
        "rows": [asdict(row) for row in rows],
        "engine": engine,
        "memory": grant.pages.value,
        "verify": config.verify,
        "batch_bytes": batch_bytes,
    }


def _one_size(
    store: Store, arena: Arena, raw: RawNixl, record: int, count: int, rounds: int, rng: np.random.Generator
) -> list[Row]:
    namespace = store.namespace(model="bench", layout=PageLayout.opaque(record))
    pages = arena.array[: count * record].reshape(count, record)
    save, load = _Samples([], [], []), _Samples([], [], [])
    for number in range(rounds + 1):
        keys = rng.integers(0, 256, (count, 32), dtype=np.uint8)
        fill_pages(keys, pages)
        ours = _timed(save, partial(_save, namespace, keys, pages))
        if not ours.all_ok:
            raise GdsStoreError(f"the bench could not save: {ours.reasons()}")
        save.raw.append(raw.run(Op.WRITE, record, count, rng))
        order = rng.permutation(count)
        _load(namespace, keys[order], pages, load)
        load.raw.append(raw.run(Op.READ, record, count, rng))
        if number == 0:  # warm-up: compiles, opens files
            save, load = _Samples([], [], []), _Samples([], [], [])
    nbytes = count * record
    return [
        _row("save", record, nbytes, save, raw.fio(Op.WRITE, record)),
        _row("load", record, nbytes, load, raw.fio(Op.READ, record)),
    ]


def _save(namespace: BoundNamespace, keys: npt.NDArray[np.uint8], pages: npt.NDArray[np.uint8]) -> SaveResult:
    return namespace.save(keys, pages).result()


def _load(
    namespace: BoundNamespace, keys: npt.NDArray[np.uint8], pages: npt.NDArray[np.uint8], load: _Samples
) -> None:
    pages[:] = 0
    result = _timed(load, lambda: namespace.load(keys, pages).result())
    wrong = len(count_wrong(keys, pages))
    if not result.all_ok or wrong:
        raise GdsStoreError(f"the bench could not load: {result.reasons()}, wrong pages: {wrong}")


def _timed(samples: _Samples, call: Callable[[], Any]) -> Any:
    cpu, start = time.process_time(), time.perf_counter()
    result = call()
    samples.ours.append(time.perf_counter() - start)
    samples.cpu.append(time.process_time() - cpu)
    return result


def _row(direction: str, record: int, nbytes: int, samples: _Samples, fio: float | None) -> Row:
    ours, raw, cpu = (np.array(values) for values in (samples.ours, samples.raw, samples.cpu))
    return Row(
        record,
        direction,
        round(float(np.median(nbytes / ours)) / 1e9, 3),
        round(float(np.median(nbytes / raw)) / 1e9, 3),
        round(float(np.median(raw / ours)), 3),
        round(float(np.median(cpu)) / (nbytes / 1e9), 3),
        None if fio is None else round(fio, 3),
        len(ours),
    )

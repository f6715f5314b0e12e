"""How long a look-up of 128 keys takes in a store of millions of pages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.bound import BoundNamespace
from gdsstore.catalog.keys import index_keys
from gdsstore.catalog.records import Run
from gdsstore.config import Config
from gdsstore.layout import PageLayout
from gdsstore.store import Store
from gdsstore.volume.format import Geometry

KEYS = 128
CALLS = 2000
BATCH = 50_000
SAVED_TOGETHER = 24  # pages of a save: the mean request of the Mooncake conversation trace


def bench_lookup(directory: Path, pages: int) -> dict[str, Any]:
    """Fill a catalog with `pages` tiny pages (no payload: a look-up reads none) and time look-ups, each with other keys.

    `prefix`: 128 keys in a row, as saved, in groups of 24. `scattered`: every key from another save, the worst case.
    """
    with Store(directory, Config.load(capacity="64GiB", maintain=False)) as store:
        namespace = store.namespace(model="bench", layout=PageLayout.opaque(4096))
        start = time.perf_counter()
        keys = _fill(store, namespace, pages)
        fill_s = time.perf_counter() - start
        rng = np.random.default_rng(2)
        starts = rng.integers(0, len(keys) - KEYS, CALLS)
        prefix = _time(namespace, [keys[at : at + KEYS] for at in starts])
        scattered = _time(namespace, [keys[rng.integers(0, len(keys), KEYS)] for _ in range(CALLS)])
        absent = _time(namespace, [rng.integers(0, 256, (KEYS, 32), dtype=np.uint8) for _ in range(CALLS)])
        catalog = store.catalog.stats()
    return {
        "pages": pages,
        "keys": KEYS,
        "calls": CALLS,
        "prefix": prefix,
        "scattered": scattered,
        "absent": absent,
        "fill_s": round(fill_s, 1),
        "catalog_bytes": catalog["used_bytes"],
        "catalog_depth": catalog["depth"],
    }


def _fill(store: Store, namespace: BoundNamespace, pages: int) -> npt.NDArray[np.uint8]:
    keys = np.random.default_rng(1).integers(0, 256, (pages, 32), dtype=np.uint8)
    index, tag = index_keys(keys, namespace.digest)
    slots = Geometry.of(store.segment_bytes, 4096).slot_count
    for start in range(0, pages, BATCH):
        stop = min(start + BATCH, pages)
        runs, at = [], start
        while at < stop:
            part = slice(at, min(at + SAVED_TOGETHER, stop, (at // slots + 1) * slots))
            n = part.stop - at
            sizes = np.full(n, 4096, np.uint32)
            runs.append(Run(at // slots, at % slots, 1, index[part], tag[part], tag[part], sizes))
            at = part.stop
        with store.catalog.write(pages=stop - start) as txn:
            store.catalog.commit(txn, namespace.digest, runs)
    return keys


def _time(namespace: BoundNamespace, calls: list[npt.NDArray[np.uint8]]) -> dict[str, float]:
    seconds = np.empty(len(calls))
    found = 0
    for number, keys in enumerate(calls):
        start = time.perf_counter()
        found += namespace.lookup(keys)
        seconds[number] = time.perf_counter() - start
    return {
        "p50_us": round(float(np.median(seconds)) * 1e6, 1),
        "p99_us": round(float(np.percentile(seconds, 99)) * 1e6, 1),
        "found_of_128": round(found / len(calls), 1),
    }

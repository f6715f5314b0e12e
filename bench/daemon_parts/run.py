"""What is measured: look-ups through the daemon, and loads while it is left alone and while it is asked a lot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import gdsstore
from daemon_parts.processes import Burden, burden, daemon
from gdsstore.errors import GdsStoreError
from gdsstore.node.client import NodeClient
from gdsstore.replay.truth import U8, count_wrong, fill_pages
from gdsstore.sizes import KiB, MiB
from gdsstore.waiting import Deadline

LOOKUP_KEYS = 128
WAIT_S = 120.0
AIM = 0.95


@dataclass(frozen=True, slots=True)
class Sizes:
    """`half_s`: how long each half of a round takes. `*_per_s`: the burden."""

    page_bytes: int = MiB
    pages: int = 512
    lookups: int = 20_000
    rounds: int = 9
    half_s: float = 2.0
    lookups_per_s: int = 500
    http_per_s: int = 20


FULL = Sizes()
QUICK = Sizes(pages=128, lookups=2_000, rounds=5, half_s=1.0)
TINY = Sizes(page_bytes=64 * KiB, pages=128, lookups=100, rounds=1, half_s=0.2)  # for the tests


def run(directory: Path, sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """All rows. Raises GdsStoreError for a wrong page, or one that does not come."""
    data_bytes = sizes.pages * sizes.page_bytes
    settings: dict[str, Any] = {"capacity": 2 * data_bytes + 256 * MiB, "segment_bytes": 16 * MiB}
    keys = np.random.default_rng(0).integers(0, 256, (sizes.pages, 32), np.uint8)
    layout = gdsstore.PageLayout.opaque(sizes.page_bytes)
    say("saving")
    with gdsstore.open(directory, daemon="off", **settings) as store:
        pages = store.namespace(model="daemon-bench", layout=layout)
        memory = np.zeros((sizes.pages, sizes.page_bytes), np.uint8)
        fill_pages(keys, memory)
        if not pages.save(keys, memory, deadline_s=WAIT_S).result(2 * WAIT_S).all_ok:
            raise GdsStoreError("the pages to measure with could not be saved")
        digest = pages.digest
    per_s = sizes.lookups_per_s, sizes.http_per_s
    rows = []
    with (
        daemon(directory, 5 * data_bytes + 64 * MiB) as address,  # it lends a quarter to one process
        burden(directory, address, digest, per_s) as load,
    ):
        say("look-ups")
        client = NodeClient(directory)
        lookups = _lookups(client, digest, keys[:LOOKUP_KEYS], sizes.lookups)
        _prefetch(client, digest, keys)
        for name, mode in (("drive", "off"), ("shared memory", "auto")):
            with gdsstore.open(directory, daemon=mode, **settings) as store:
                pages = store.namespace(model="daemon-bench", layout=layout)
                say(f"loads from {name}")
                rows.append(_loads(name, store, pages, keys, memory, load, sizes))
        client.close()
    return {
        "schema": "gdsstore.bench.daemon",
        "schema_version": 1,
        "parameters": {**asdict(sizes), "lookup_keys": LOOKUP_KEYS, "aim": AIM},
        "lookups": lookups,
        "rows": rows,
    }


def _lookups(client: NodeClient, digest: bytes, keys: U8, count: int) -> dict[str, Any]:
    """Of one client, with nothing else going on."""
    seconds: list[float] = []
    end = time.monotonic() + WAIT_S
    while len(seconds) < count and time.monotonic() < end:
        start = time.perf_counter()
        found = client.lookup(digest, keys, Deadline(1.0))
        took = time.perf_counter() - start
        if found is None:
            time.sleep(0.02)  # the namespace is being opened, or the machine is busy
        elif found.leading != len(keys):
            raise GdsStoreError("a page that was saved was not found", found=found.leading)
        else:
            seconds.append(took)
    return {"count": len(seconds), **_percentiles(seconds)}


def _prefetch(client: NodeClient, digest: bytes, keys: U8) -> None:
    number, end = client.start_prefetch(digest, keys, WAIT_S), time.monotonic() + WAIT_S
    while number is not None and time.monotonic() < end:
        progress = client.prefetch_progress(number, Deadline(1.0))
        if progress is not None and progress.warm == progress.wanted:
            return
        time.sleep(0.01)
    raise GdsStoreError("the daemon did not bring the pages into its cache")


def _loads(
    name: str,
    store: gdsstore.Store,
    pages: gdsstore.BoundNamespace,
    keys: U8,
    memory: U8,
    load: Burden,
    sizes: Sizes,
) -> dict[str, Any]:
    """Rounds of two halves, with and without the burden, which of them first taking turns."""
    rounds, lookups, http = [], [], []
    _half(pages, keys, memory, sizes.half_s)  # does not count
    before = store.stats()
    for number in range(sizes.rounds):
        gbps = {}
        for burdened in (number % 2 == 0, number % 2 == 1):
            if burdened:
                load.go()
            gbps[burdened] = _half(pages, keys, memory, sizes.half_s)
            if burdened:
                more_lookups, more_http = load.rest()
                lookups += more_lookups
                http += more_http
        rounds.append(
            {"alone_gbps": gbps[False], "burdened_gbps": gbps[True], "ratio": gbps[True] / gbps[False]}
        )
    loaded, shared = (
        store.stats().get(counter, 0) - before.get(counter, 0)
        for counter in ("pages_loaded", "pages_loaded_from_shared")
    )
    ratio = median(each["ratio"] for each in rounds)
    return {
        "source": name,
        "ratio": ratio,
        "meets": ratio >= AIM,
        "alone_gbps": median(each["alone_gbps"] for each in rounds),
        "burdened_gbps": median(each["burdened_gbps"] for each in rounds),
        "from_shared_memory": shared / loaded if loaded else None,
        "lookups": {"count": len(lookups), **_percentiles(lookups)},
        "http": {"count": len(http), **_percentiles(http)},
        "rounds": rounds,
    }


def _half(pages: gdsstore.BoundNamespace, keys: U8, memory: U8, seconds: float) -> float:
    """GB/s of loads of all pages, one after the other, for a while. The last one's bytes are compared."""
    nbytes, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        memory[:, ::4096] = 0
        result = pages.load(keys, memory, deadline_s=WAIT_S).result(2 * WAIT_S)
        if not result.ok.all():
            raise GdsStoreError("pages were not loaded", **result.reasons())
        nbytes += memory.nbytes
    took = time.monotonic() - start
    if len(count_wrong(keys, memory)):
        raise GdsStoreError("a loaded page is wrong")
    return nbytes / took / 1e9


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    if not seconds:
        return {"p50_us": None, "p99_us": None}
    p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99]).tolist()
    return {"p50_us": p50, "p99_us": p99}

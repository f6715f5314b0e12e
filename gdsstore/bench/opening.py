"""How long a store takes to open: after a clean shutdown, and when its catalog must be rebuilt from the record tables."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from gdsstore.config import Config
from gdsstore.layout import PageLayout
from gdsstore.namespace import Namespace
from gdsstore.store import Store
from gdsstore.volume.format import (
    ENTRY,
    FLAG_STORED,
    Geometry,
    Superblock,
    entry_salt,
    seal_entries,
)
from gdsstore.volume.volume import write_entries

OPENS = 9
REBUILDS = 3


def bench_open(directory: Path, pages: int) -> dict[str, Any]:
    """Make a store whose tables hold `pages` tiny pages (payloads are holes: opening reads none), and open it again and again."""
    config = Config.load(capacity="64GiB", maintain=False)
    Store(directory, config).close()
    _fill(directory, config, pages)
    rebuilds, opens = [], []
    found = 0
    for _ in range(REBUILDS):
        shutil.rmtree(directory / "catalog")
        start = time.perf_counter()
        store = Store(directory, config)
        rebuilds.append(time.perf_counter() - start)
        found = store.catalog.stats()["pages"]
        store.close()
    for _ in range(OPENS):
        start = time.perf_counter()
        store = Store(directory, config)
        opens.append(time.perf_counter() - start)
        store.close()
    return {
        "pages": pages,
        "pages_found": found,
        "open_ms": round(float(np.median(opens)) * 1e3, 2),
        "rebuild_s": round(float(np.median(rebuilds)), 3),
        "rebuild_s_per_million": round(float(np.median(rebuilds)) / pages * 1e6, 3),
    }


def _fill(directory: Path, config: Config, pages: int) -> None:
    with Store(directory, config) as store:
        uuid, segment_bytes, volume = store.uuid, store.segment_bytes, store.volumes[0]
    digest = Namespace(model="bench", layout=PageLayout.opaque(4096)).digest
    geometry = Geometry.of(segment_bytes, 4096)
    rng = np.random.default_rng(1)
    for segment_id, start in enumerate(range(0, pages, geometry.slot_count)):
        count = min(geometry.slot_count, pages - start)
        entries = np.zeros(count, ENTRY)
        entries["key"] = rng.integers(0, 256, (count, 32), dtype=np.uint8)
        entries["namespace"] = np.frombuffer(digest, np.uint8)
        entries["generation"], entries["segment_id"] = 1, segment_id
        entries["slot"], entries["sequence"] = np.arange(count), start + 1 + np.arange(count)
        entries["payload_bytes"], entries["flags"] = 4096, FLAG_STORED
        seal_entries(entries, entry_salt(uuid))
        fd = os.open(
            volume.segment_path(segment_id), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        try:
            os.ftruncate(fd, segment_bytes)
            os.pwrite(fd, Superblock(uuid, segment_id, 1, geometry).encode(), 0)
            write_entries(fd, 0, entries)
        finally:
            os.close(fd)

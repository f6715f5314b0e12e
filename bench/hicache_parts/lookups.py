"""How long it takes to learn that 128 pages are there, and to start, beside how many pages and files lie on the drive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdsstore.errors import GdsStoreError
from hicache_parts.contenders import Opener, opened
from hicache_parts.pool import HostPages
from hicache_parts.rounds import Rng, as_names, new_keys

KEYS = 128
CALLS = 300
STARTS = 3


@dataclass(frozen=True, slots=True)
class Lookup:
    """Medians. `start_s`: from the constructor until the pools are registered, in a directory with all those pages."""

    backend: str
    pages: int
    keys: int
    exists_us: float
    start_s: float
    files: int
    fill_s: float


def time_lookups(
    name: str,
    opener: Opener,
    directory: Path,
    pages: HostPages,
    sizes: tuple[int, ...],
    rng: Rng,
    say: Callable[[str], None],
) -> list[Lookup]:
    """One row for each of the `sizes` (rising), in pages. `pages`: any, their bytes do not matter.

    Raises GdsStoreError for a page that is there and not found.
    """
    keys: list[str] = []
    rows = []
    filled_s = 0.0
    for size in sizes:
        say(f"{name}: filling up to {size:,} pages")
        with opened(opener, directory, pages) as contender:
            start = time.perf_counter()
            while len(keys) < size:
                batch = as_names(new_keys(min(pages.count, size - len(keys)), rng))
                if not contender.save(batch, pages.indices(np.arange(len(batch)))):
                    raise GdsStoreError(f"{name} could not save all pages", page_bytes=pages.page_bytes)
                keys += batch
            filled_s += time.perf_counter() - start
        say(f"{name}: looking up among {size:,} pages")
        starts = []
        for _ in range(STARTS - 1):
            start = time.perf_counter()
            with opened(opener, directory, pages):
                starts.append(time.perf_counter() - start)
        start = time.perf_counter()
        with opened(opener, directory, pages) as contender:
            starts.append(time.perf_counter() - start)
            calls = []
            for at in rng.integers(0, len(keys) - KEYS + 1, CALLS):
                asked = keys[at : at + KEYS]
                start = time.perf_counter()
                found = contender.exists(asked)
                calls.append(time.perf_counter() - start)
                if found != KEYS:
                    raise GdsStoreError(f"{name} finds {found} of {KEYS} pages that are there")
        rows.append(
            Lookup(
                name,
                size,
                KEYS,
                round(float(np.median(calls)) * 1e6, 1),
                round(float(np.median(starts)), 6),
                _count_files(directory),
                round(filled_s, 1),
            )
        )
    return rows


def _count_files(directory: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(directory))

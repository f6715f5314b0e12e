"""The whole benchmark, and what has to be known to read its numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gds_parts.machine import this_machine
from hicache_parts.contenders import FILE, OURS, open_file, open_ours, opened
from hicache_parts.pool import HostPages
from hicache_parts.rounds import Rng, new_keys

from gdsstore.bench.ceiling import RawNixl
from gdsstore.config import Config
from gdsstore.errors import StoreError
from gdsstore.memory.arena import Arena
from gdsstore.sizes import GiB, format_size
from gdsstore.store import Store
from linker_parts.costs import copy_alone
from linker_parts.device import device
from linker_parts.rounds import Overlap, Peer, Row, measure, measure_peers
from linker_parts.sizes import LAYERS, PAGE_BYTES, SEGMENT_BYTES, Sizes

SCHEMA, SCHEMA_VERSION = "gdsstore.bench.linker", 2
RAW_BATCHES = 2  # of the ceiling's files

NOTES = (
    "the device pool is SGLang's own MHA pool in host memory: bytes go through staging memory and are copied into the pool's "
    "pieces by the CPU, which on a GPU its kernels do; the ceiling reads whole records into one block of huge pages",
    "a restore: look-up, load, start, waiting for all layers, finish; each is followed by the ceiling with as many blocks of the "
    "same size, and ratio is the median of the rounds' own",
    "copy_s: one thread copies the restore's pieces out of that block, alone; copy_ratio: (ceiling + copy_s) / total, so that 1 is "
    "what reading everything and copying it afterwards would take, unverified",
    "cpu_s_per_gb: CPU time of the whole process; queued_s: time for which its threads were ready and had no core, all together; "
    "where that is a good part of the total the machine was busy with other things, and ratio says more of them than of the linker",
    "every restore is verified by the store, and those without a forward are compared byte for byte",
    "the forward sleeps: it leaves the CPU to the load, as a GPU does; to_compute: total by the forward alone; to_slower: by the "
    "slower of the restore alone and the forward alone",
    "scheduler_us_per_page: time of look-up, load and start, and CPU time of finish, in the thread that makes these calls",
    "the peers' rows are loads from storage into HiCache's host pool (MHA, page_first), on which the copy to the device follows; "
    "their ceiling reads into that pool; the peers verify nothing, except gdsstore",
)

Say = Callable[[str], None]


def run(directory: Path, sizes: Sizes, say: Say) -> dict[str, Any]:
    """Measure in `directory`, which the caller removes. Raises GdsStoreError, also for a page that is missing or wrong."""
    rng = np.random.default_rng(1)
    _check_room(directory, sizes)
    rows: list[Row] = []
    overlaps: list[Overlap] = []
    peers: list[Peer] = []
    most = max(sizes.pages)
    with ExitStack() as stack:
        target = stack.enter_context(device(directory / "linker", most))
        memory = stack.enter_context(Arena(most * PAGE_BYTES, pin="off"))
        raw = stack.enter_context(
            RawNixl(directory / "raw", memory, max(RAW_BATCHES * memory.size_bytes, GiB))
        )
        say(f"saving {most} pages of {format_size(PAGE_BYTES)}")
        keys = new_keys(most, rng)
        target.store(keys)
        for count in sizes.pages:
            say(f"restoring {count} pages")
            copy = partial(copy_alone, target, memory.address)
            row, beside = measure(target, keys[:count], raw, copy, sizes.factors, sizes.rounds, rng)
            rows.append(row)
            overlaps += beside
    for count in sizes.pages:
        say(f"the peers, {count} pages")
        with _removed(directory / "peers") as folder:
            peers += _peers(folder, count, sizes.rounds, rng)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(directory).to_dict(),
        "page_bytes": PAGE_BYTES,
        "layers": LAYERS,
        "parameters": asdict(sizes),
        "rows": [asdict(row) for row in rows],
        "overlaps": [asdict(row) for row in overlaps],
        "peers": [asdict(row) for row in peers],
        "notes": list(NOTES),
    }


def _peers(folder: Path, count: int, rounds: int, rng: Rng) -> list[Peer]:
    pages = HostPages(PAGE_BYTES, count)
    settings: dict[str, Any] = {"capacity": 2 * count * PAGE_BYTES + GiB, "segment_bytes": SEGMENT_BYTES}
    with Store(folder / OURS, Config.load(**settings)):
        pass  # made ahead, as by `gdsstore format`
    with ExitStack() as stack:
        contenders = [
            stack.enter_context(
                opened(lambda where, pool: open_ours(where, pool, **settings), folder / OURS, pages)
            ),
            stack.enter_context(opened(open_file, folder / FILE, pages)),
        ]
        raw = stack.enter_context(RawNixl(folder / "raw", pages, max(RAW_BATCHES * count * PAGE_BYTES, GiB)))
        return measure_peers(contenders, pages, raw, rounds, rng)


def _check_room(directory: Path, sizes: Sizes) -> None:
    """Raises StoreError where the drive is too full."""
    need = (RAW_BATCHES + 5) * max(sizes.pages) * PAGE_BYTES + 3 * GiB
    free = shutil.disk_usage(directory).free
    if free < need:
        raise StoreError(
            f"the bench needs {format_size(need)} on this drive, and {format_size(free)} are free; "
            "take another --directory, or --quick",
            path=str(directory),
        )


@contextmanager
def _removed(folder: Path) -> Iterator[Path]:
    """A new folder that is gone afterwards."""
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

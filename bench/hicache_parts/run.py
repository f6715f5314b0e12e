"""The whole benchmark: who takes part, sizes, and what has to be known to read the numbers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gdsstore.bench.ceiling import RawNixl
from gdsstore.config import Config
from gdsstore.errors import GdsStoreError, StoreError
from gdsstore.sizes import GiB, KiB, MiB, format_size
from gdsstore.store import Store
from hicache_parts.contenders import FILE, NIXL, OURS, Opener, open_file, open_nixl, open_ours, opened
from hicache_parts.lookups import Lookup, time_lookups
from hicache_parts.pool import HostPages, use_host_allocator
from hicache_parts.rounds import Rng, Row, as_names, check_loaded, new_keys, take_turns

SMALL_PAGE_BYTES = 8 * KiB  # of look-ups
SEGMENT_BYTES = 256 * MiB  # what a store of a real size has
CEILING_FILES_BYTES = 4  # batches
PEERS: dict[str, Opener] = {FILE: open_file, NIXL: open_nixl}

NOTES = (
    "all backends move the pages of one SGLang host pool (MHA, page_first, K and V of a page apart), at random places in it",
    "the ceiling moves its blocks from and into the same host pool, so in the same kind of memory (pool_huge_share); "
    "host_allocator tells whose memory it is",
    "each timed call is followed by the raw ceiling with the same number and size of blocks; ratio is the median of the rounds' "
    "own ratios; ceiling_gbps is the median of that backend's own ceilings",
    "file goes through the page cache: its dirty pages are written out within the timed save (sync_file_range, no journal "
    "commit), and its files are dropped from the cache before a load (posix_fadvise); the kernel's write-back threads are not "
    "in its CPU time",
    "nixl: POSIX plugin with io_uring and O_DIRECT; its cleaner, which deletes pages on a drive that is 80 % full, is off",
    "gdsstore: segments preallocated, as by `gdsstore format`; every loaded page is verified against its checksum; the peers "
    "verify nothing",
    "nobody syncs within a save; gdsstore does so each second in the background (durability = interval), the peers never",
    "start_s and exists_us are taken with the directories in the kernel's caches",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    batches: tuple[tuple[int, int], ...]  # bytes a page, pages a batch
    rounds: int
    stored: tuple[int, ...]  # pages, of look-ups


FULL = Sizes(((256 * KiB, 128), (MiB, 128), (4 * MiB, 128)), rounds=9, stored=(10_000, 200_000))
QUICK = Sizes(((256 * KiB, 128), (MiB, 128), (4 * MiB, 64)), rounds=5, stored=(10_000,))
TINY = Sizes(((256 * KiB, 4),), rounds=1, stored=(256,))

Say = Callable[[str], None]


def run(directory: Path, sizes: Sizes, say: Say, *, host_allocator: bool = False) -> dict[str, Any]:
    """Measure in `directory`, which the caller removes. `host_allocator`: in a pool of gdsstore's memory, not of SGLang's.
    Raises GdsStoreError, also for a page that is missing or wrong."""
    if host_allocator:
        use_host_allocator()
    rng = np.random.default_rng(1)
    _check_room(directory, sizes)
    say("a trial of every backend")
    left_out = _try_peers(directory / "trial", rng)
    peers = {name: opener for name, opener in PEERS.items() if name not in left_out}
    rows: list[Row] = []
    memory: dict[str, float] = {}
    for page_bytes, count in sizes.batches:
        say(f"{count} pages of {format_size(page_bytes)}")
        with _removed(directory / "batches") as folder:
            pages = HostPages(page_bytes, count)
            rows += _one_size(folder, peers, pages, sizes.rounds, rng)
            memory[str(page_bytes)] = pages.huge_share()
    lookups: list[Lookup] = []
    with _removed(directory / "lookups") as folder:
        pages = HostPages(SMALL_PAGE_BYTES, 128)
        pages.fill(new_keys(pages.count, rng), np.arange(pages.count))
        capacity = max(GiB, 4 * max(sizes.stored) * SMALL_PAGE_BYTES)
        openers: dict[str, Opener] = {OURS: partial(open_ours, capacity=capacity), **peers}
        if FILE in openers:
            openers[FILE] = partial(open_file, flush=False)
        for name, opener in openers.items():
            lookups += time_lookups(name, opener, folder / name, pages, sizes.stored, rng, say)
    return {
        "rows": [asdict(row) for row in rows],
        "lookups": [asdict(row) for row in lookups],
        "peers_left_out": left_out,
        "batch_pages": {str(page_bytes): count for page_bytes, count in sizes.batches},
        "host_allocator": host_allocator,
        "pool_huge_share": memory,
        "small_page_bytes": SMALL_PAGE_BYTES,
        "notes": list(NOTES),
    }


def _one_size(folder: Path, peers: dict[str, Opener], pages: HostPages, rounds: int, rng: Rng) -> list[Row]:
    batch_bytes = pages.count * pages.page_bytes
    settings: dict[str, Any] = {
        "capacity": _capacity(batch_bytes, rounds),
        "segment_bytes": SEGMENT_BYTES,
        "grace_s": 0.0,
    }
    with Store(folder / OURS, Config.load(**settings)) as store:
        store.preallocate()
    openers: dict[str, Opener] = {OURS: partial(open_ours, **settings), **peers}
    with ExitStack() as stack:
        raw = stack.enter_context(RawNixl(folder / "raw", pages, max(CEILING_FILES_BYTES * batch_bytes, GiB)))
        contenders = [
            stack.enter_context(opened(opener, folder / name, pages)) for name, opener in openers.items()
        ]
        return take_turns(contenders, pages, raw, rounds, rng)


def _capacity(batch_bytes: int, rounds: int) -> int:
    """Room for all rounds, so that nothing is reclaimed, with what a record adds to a page."""
    return (rounds + 2) * batch_bytes * 5 // 4 + GiB


def _check_room(directory: Path, sizes: Sizes) -> None:
    """Raises StoreError where the drive is too full for the largest size."""
    batch_bytes = max(page_bytes * count for page_bytes, count in sizes.batches)
    need = _capacity(batch_bytes, sizes.rounds) + (len(PEERS) * (sizes.rounds + 1) + 4) * batch_bytes + GiB
    free = shutil.disk_usage(directory).free
    if free < need:
        raise StoreError(
            f"the bench needs {format_size(need)} on this drive, and {format_size(free)} are free; "
            "take another --directory, or --quick",
            path=str(directory),
        )


def _try_peers(folder: Path, rng: Rng) -> dict[str, str]:
    """Why a peer cannot run here, by name. What fails later than in this trial ends the bench."""
    left_out = {}
    pages = HostPages(256 * KiB, 2)
    for name, opener in PEERS.items():
        logged = _LastError()
        logging.getLogger("sglang").addHandler(logged)
        try:
            with _removed(folder) as trial, opened(opener, trial / name, pages) as contender:
                keys, place = new_keys(pages.count, rng), np.arange(pages.count)
                pages.fill(keys, place)
                if not contender.save(as_names(keys), pages.indices(place)):
                    raise GdsStoreError("it could not save two pages")
                pages.blank()
                loaded = contender.load(as_names(keys), pages.indices(place))
                check_loaded(name, loaded, keys, place, pages)
        except Exception as error:  # whatever it is: that peer cannot run here
            why = f"{type(error).__name__}: {error}"
            left_out[name] = f"{why}; its log says: {logged.text}" if logged.text else why
        finally:
            logging.getLogger("sglang").removeHandler(logged)
    return left_out


class _LastError(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextmanager
def _removed(folder: Path) -> Iterator[Path]:
    """A new folder that is gone afterwards."""
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

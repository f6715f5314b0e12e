"""The parts of a store that move bytes: engine, open files, staging arena, mover, saver.

Made by the first save or load, not by `open`: a process that only looks pages up pays for none of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gdsstore.catalog.allocate import SegmentPool
from gdsstore.catalog.heat import Heat
from gdsstore.catalog.index import Catalog
from gdsstore.config import Config, Durability
from gdsstore.engines.base import Engine, Op
from gdsstore.engines.paths import Path
from gdsstore.memory.arena import Arena
from gdsstore.memory.numa import node_of_path
from gdsstore.memory.shared import SharedArena
from gdsstore.observe.counters import Counters
from gdsstore.observe.paths import PathTotals
from gdsstore.sealing.cipher import PageCipher
from gdsstore.sealing.side import SealingSide
from gdsstore.sequence import Sequencer
from gdsstore.transfer.chunk_counts import I64, Moved
from gdsstore.transfer.commit import Commits
from gdsstore.transfer.flight import Side
from gdsstore.transfer.host_side import HostSide
from gdsstore.transfer.mover import STALL_S, Mover
from gdsstore.transfer.results import PageStatus, Statuses
from gdsstore.transfer.save import Saver
from gdsstore.volume.files import SegmentFiles
from gdsstore.volume.format import entry_salt
from gdsstore.volume.health import VolumeHealth
from gdsstore.volume.volume import Volume
from gdsstore.waiting import Deadline

MOVED = (PageStatus.LOADED, PageStatus.SAVED)
IO_FAILURES = (PageStatus.MISS_IO, PageStatus.FAILED_IO)
LATE = (PageStatus.MISS_DEADLINE, PageStatus.FAILED_DEADLINE)


def make_arena(config: Config, size_bytes: int, volume: Volume) -> Arena:
    """Memory as the config asks for it; with no NUMA node given, on that of the volume's drive."""
    return Arena(size_bytes, **_wishes(config, volume))


def make_shared_arena(config: Config, size_bytes: int, volume: Volume) -> SharedArena:
    """The same, which other processes can map."""
    return SharedArena(size_bytes, **_wishes(config, volume))


def _wishes(config: Config, volume: Volume) -> dict[str, Any]:
    node = config.numa_node
    if node < 0:
        near = node_of_path(volume.path)
        node = -1 if near is None else near
    return {"huge_pages": config.huge_pages.value, "numa_node": node, "pin": config.pin_host.value}


class Staging:
    """The arena for pages that the drive cannot reach in place; allocated when the first such page comes."""

    def __init__(self, make: Callable[[], Arena]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._arena: Arena | None = None

    def arena(self) -> Arena:
        with self._lock:
            if self._arena is None:
                self._arena = self._make()
            return self._arena

    def close(self, timeout_s: float) -> None:
        with self._lock:
            if self._arena is not None:
                self._arena.close(timeout_s)


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a store the parts that move bytes work with."""

    root: FilePath  # the store directory
    config: Config
    volumes: Sequence[Volume]
    segment_bytes: int
    uuid: bytes
    catalog: Catalog
    pool: SegmentPool
    heat: Heat
    sequencer: Sequencer
    counters: Counters
    paths: PathTotals
    health: Mapping[
        Op, Sequence[VolumeHealth]
    ]  # of each volume; a drive may take no writes and still read well
    cipher: PageCipher | None = None  # where pages are encrypted

    @property
    def unverified_owner(self) -> bytes | None:
        """The store's uuid, where loads compare no checksums, which would tell that a segment is another store's."""
        return None if self.config.verify else self.uuid

    def mover(self, engine: Engine, files: SegmentFiles, side: Side, moved: Moved | None = None) -> Mover:
        return Mover(
            engine,
            files,
            side,
            self.counters,
            moved=moved,
            health=self.health,
            stall_s=min(STALL_S, self.config.io_deadline_s),
        )

    def saver(self, mover: Mover, chunk_bytes: int) -> Saver:
        commits = Commits(
            self.pool,
            self.catalog,
            self.heat,
            self.sequencer,
            entry_salt(self.uuid),
            durable=self.config.durability is Durability.COMMIT,
        )
        return Saver(mover, commits, chunk_bytes)


@dataclass(frozen=True, slots=True)
class Route:
    """The way that the pages of one call take. `report` is told how many pages moved, in how many seconds, and whether the drive
    or the device failed."""

    mover: Mover
    saver: Saver
    chunk_bytes: int
    report: Callable[[int, float, bool], None] | None = None

    @contextlib.contextmanager
    def timed(self, status: Statuses) -> Iterator[None]:
        """Around the moving of a call's pages; `status` is filled in meanwhile."""
        start = time.monotonic()
        yield
        if self.report is not None:
            seconds = time.monotonic() - start
            # A call with little time of its own says nothing of the path.
            bad = IO_FAILURES + LATE if seconds >= STALL_S else IO_FAILURES
            moved = int(np.count_nonzero(np.isin(status, MOVED)))
            self.report(moved, seconds, bool(np.isin(status, bad).any()))


class Moving:
    """What one process needs to move pages of host memory to and from one store."""

    def __init__(self, engine: Engine, parts: Parts) -> None:
        config, volumes = parts.config, parts.volumes
        self.engine = engine
        self.files = SegmentFiles(
            engine, volumes, parts.segment_bytes, config.max_open_files, owner=parts.unverified_owner
        )
        self.staging = Staging(lambda: make_arena(config, config.staging_bytes, volumes[0]))
        alignment = max(volume.direct.memory_alignment for volume in volumes)
        side = (
            HostSide(self.staging.arena, alignment, config.zero_copy)
            if parts.cipher is None
            else SealingSide(self.staging.arena, alignment, parts.cipher)
        )

        def moved(op: Op, cls: str, nbytes: I64, operations: I64) -> None:
            for volume in np.flatnonzero(nbytes).tolist():
                counts = int(nbytes[volume]), int(operations[volume])
                parts.paths.add(Path.HOST, engine.name, volume, op, counts[0], cls=cls, operations=counts[1])

        self.mover = parts.mover(engine, self.files, side, moved)
        self.saver = parts.saver(self.mover, config.chunk_bytes)
        self._route = Route(self.mover, self.saver, config.chunk_bytes)

    def route(self, op: Op, record_bytes: int, pages: int) -> Route:
        """The way that `pages` pages of `record_bytes` bytes take."""
        return self._route

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, then let go; whatever one step raises, the others happen."""
        deadline = Deadline(timeout_s)
        with contextlib.ExitStack() as steps:
            steps.callback(lambda: self.staging.close(deadline.left_s))
            steps.callback(self.files.close)
            steps.callback(self.mover.sweep)  # what has ended since lets go of its file
            steps.callback(self.engine.close, timeout_s)

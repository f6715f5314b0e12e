"""Store: the facade that ties volumes, catalog, engine and transfers together."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from gdsstore.bound import BoundNamespace
from gdsstore.catalog.allocate import SegmentPool
from gdsstore.catalog.heat import Heat
from gdsstore.catalog.reclaim import Reclaimer
from gdsstore.catalog.records import SegmentState
from gdsstore.catalog.state import Locks
from gdsstore.config import AutoOff, Config, Durability, EngineName
from gdsstore.costing import StoreCost
from gdsstore.directory import StoreDirectory, as_paths
from gdsstore.drive_pages import DrivePages
from gdsstore.engines.base import Engine, Op
from gdsstore.errors import ConfigError, StoreClosedError, VolumeError
from gdsstore.layout import PageLayout
from gdsstore.memory.arena import Arena
from gdsstore.memory.device_views import whole_buffer
from gdsstore.movers import Movers
from gdsstore.moving import Moving, Parts, make_arena
from gdsstore.namespace import Namespace
from gdsstore.observe.counters import Counters
from gdsstore.observe.paths import PathRow, PathTotals
from gdsstore.open_stores import AFTER_FORK, claim, let_go
from gdsstore.opening import close_parts, open_parts
from gdsstore.sequence import Sequencer
from gdsstore.transfer.admission import Admission, ScheduledAdmission
from gdsstore.transfer.plan import AHEAD_CHUNKS
from gdsstore.transfer.policy import NO_KEYS
from gdsstore.transfer.policy_terms import Caps, Limits, State, TransferClass
from gdsstore.transfer.scheduler import Scheduler
from gdsstore.upkeep import Upkeep
from gdsstore.volume.health import NEVER_SICK, Breaker, HealthLimits, watch_volumes
from gdsstore.volume.placement import Placement
from gdsstore.waiting import Deadline
from gdsstore.warm_cache import WarmCache
from gdsstore.warm_pages import WarmPages

if TYPE_CHECKING:
    from gdsstore.device_moving import DeviceMoving, Registration

log = logging.getLogger("gdsstore.store")

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0
LAST_STEPS_S = 0.2  # each, when nothing is left of it: enough where nothing hangs


def open(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    capacity: int | str | None = None,
    config: Config | None = None,
    engine: Engine | str | None = None,
    **settings: Any,
) -> Store:
    """Open the store in a directory, and make it if there is none.

    `paths`: one directory, or one a volume (a filesystem on a drive of its own); the first holds the catalog. `capacity`: how
    many bytes of disk it may use ("500GiB"). `config`, or single `settings` by name: see docs/settings.md; environment and
    config file count too. `engine`: the setting, or an engine of your own instead, for host memory or that of one GPU; the
    store closes it.

    Raises StoreError and its kinds (StoreBusyError, StoreVersionError, StoreDamagedError), VolumeError, ConfigError.
    """
    own = engine if isinstance(engine, Engine) else None
    if engine is not None and own is None:
        settings["engine"] = engine
    if config is not None and (settings or capacity is not None):
        raise ConfigError("give either a config or single settings, not both")
    return Store(paths, config or Config.load(capacity=capacity, **settings), own)


class Store:
    """An open store. Thread-safe. Use as a context manager, or call `close`.

    Several processes may have one store open at the same time. In a forked child an open store is dead, and cannot be opened
    again: fork before opening, or start the process with `spawn`.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        config: Config,
        engine: Engine | None = None,
    ) -> None:
        found = as_paths(paths)
        self.config = config
        self.counters = Counters()
        self.directory = StoreDirectory(found[0])
        self._closing = self._closed = self._forked = False
        self._writing = False
        self._active = 0
        self._idle = threading.Condition()
        with contextlib.ExitStack() as undo:
            self.directory.prepare()
            self.locks = Locks(self.directory.root)
            undo.callback(self.locks.close)
            claim(self)
            undo.callback(let_go, self)
            with self.locks.opening():
                opened = open_parts(self.directory, self.locks, found, config)
            self.opened = opened
            self.uuid, self.segment_bytes = opened.info.uuid, opened.info.segment_bytes
            self.volumes, self.catalog, self.capacity_bytes = (
                opened.volumes,
                opened.catalog,
                opened.capacity_bytes,
            )
            undo.callback(close_parts, self.directory, self.locks, self.catalog)
            self.sequencer = Sequencer(max(self.directory.cleared().values(), default=0))
            self.heat = Heat(self.directory.heat, self.segment_bytes)
            undo.callback(self.heat.close)
            self.reclaimer = Reclaimer(
                self.catalog, self.volumes, self.heat, self.segment_bytes, self.capacity_bytes, config.grace_s
            )
            limits = HealthLimits() if config.drive_breaker is AutoOff.AUTO else NEVER_SICK
            self.health = {
                op: watch_volumes(len(self.volumes), limits, on_open=lambda: self.upkeep.nudge()) for op in Op
            }
            self._scheduler = Scheduler(
                Limits(workers=config.workers, offload_budget_s=config.offload_budget_s),
                [Caps(AHEAD_CHUNKS * config.chunk_bytes, config.volume_ops)] * len(self.volumes),
            )
            self.cost = StoreCost(config, self.counters, self._scheduler.reads)
            self.placement = Placement(self.volumes, self._writable)
            self.pool = SegmentPool(
                self.catalog,
                self.volumes,
                self.heat,
                self.placement,
                self.reclaimer,
                self.uuid,
                self.segment_bytes,
                self._room_taken,
            )
            parts = Parts(
                self.directory.root,
                config,
                self.volumes,
                self.segment_bytes,
                self.uuid,
                self.catalog,
                self.pool,
                self.heat,
                self.sequencer,
                self.counters,
                PathTotals(),
                self.health,
            )
            self._movers = Movers(parts, engine)
            self.cache = WarmCache(config, self.volumes[0])
            if config.engine is not EngineName.AUTO and engine is None:
                self.moving()  # asked for by name: whether it works is said now
            self.upkeep = Upkeep(self)
            self.upkeep.start()
            undo.pop_all()

    def moving(self) -> Moving:
        """The parts that move host memory; made by the first call. Raises EngineError, MissingExtraError, VolumeError."""
        return self._movers.host()

    def warm_pages(self, drive: DrivePages) -> WarmPages | None:
        """A namespace's pages in the host cache; None where the store has none. Raises StoreError without memory for it."""
        if not self.config.host_cache:
            return None

        def later(work: Callable[[], None], nbytes: int) -> None:
            deadline = Deadline(self.config.io_deadline_s)
            self.submit(lambda admission: work(), TransferClass.OFFLOAD, nbytes, deadline, lambda state: None)

        return WarmPages(drive, self.cache.namespace(drive), self.cache, self.config.write_policy, later)

    def device_moving(self, device: int) -> DeviceMoving:
        """The parts that move the memory of a GPU, by its ordinal; made by the first call, which takes seconds.

        Raises ConfigError, DeviceError, EngineError, MissingExtraError: what `path` and `strict` allow cannot be had.
        """
        with self.using():
            return self._movers.device(device)

    def register(self, buffer: Any) -> Registration:
        """Let the drive reach a GPU buffer directly: pages in it that are large and aligned skip the staging memory.

        `buffer`: one contiguous CUDA tensor or array. Close what is returned before the buffer is freed. It takes BAR1 and pinned
        memory of cuFile's: see docs/paths.md. Raises ArgumentError, and what `device_moving` raises.
        """
        found = whole_buffer(buffer)
        return self.device_moving(found.device).register(found.memory)

    def measure_paths(self, device: int = 0, seconds: float = 2.0) -> None:
        """Measure the paths to a GPU's memory again, now, instead of once when they are first used: see docs/paths.md.

        Raises what `device_moving` raises, and DeadlineError where its staging memory stays in use.
        """
        with self.using():
            self.device_moving(device).measure(seconds)

    def path_report(self) -> list[PathRow]:
        """Every byte moved since the store was opened, by path, engine, volume and direction: see docs/paths.md."""
        return self._movers.path_report()

    def _writable(self, volume: int) -> bool:
        """A sick volume is not saved to, and a slow one not while another is well."""
        health = self.health[Op.WRITE]
        return health[volume].healthy or (
            health[volume].breaker is Breaker.CLOSED and not any(each.healthy for each in health)
        )

    def _room_taken(self) -> None:
        self._writing = True
        self.upkeep.nudge()

    def sweep(self) -> None:
        """Let go of what belonged to I/O that was stuck and has ended."""
        self._movers.sweep()
        self.cache.sweep()

    # --- the public calls ---

    def namespace(
        self,
        namespace: Namespace | None = None,
        /,
        *,
        model: str = "",
        layout: PageLayout | None = None,
        **facts: Any,
    ) -> BoundNamespace:
        """The pages that are interchangeable under this identity: a Namespace, or the arguments of one.

        Raises ArgumentError where facts are missing or contradict each other, or a page is too large for this store.
        """
        with self.using():
            if namespace is None:
                namespace = Namespace(model=model, layout=layout, **facts)  # type: ignore[arg-type]
            bound = BoundNamespace(self, namespace)
            if namespace.layout.record_bytes > self.config.staging_bytes:
                raise ConfigError(
                    "a page does not fit into the staging arena; raise staging_bytes",
                    page_bytes=namespace.layout.page_bytes,
                    staging_bytes=self.config.staging_bytes,
                )
            self.directory.describe_namespace(namespace)
            return bound

    def arena(self, size_bytes: int) -> Arena:
        """Memory that moves fast: huge pages, aligned, on the right NUMA node, pinned where CUDA is. Close it yourself."""
        return make_arena(self.config, size_bytes, self.volumes[0])

    def sync(self) -> None:
        """Make all pages durable that this process saved, those that the host cache has not written yet too.

        Raises VolumeError where a drive refuses.
        """
        with self.using():
            left = self.cache.flush(self.config.io_deadline_s)
            self.pool.sync()
        if left:
            raise VolumeError(
                "the drives did not take all pages of the host cache; they stay in it", pages=left
            )

    def preallocate(
        self, size_bytes: int | None = None, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Make segments ahead of their use, up to `size_bytes` or the capacity; returns how many segments there are.

        `progress` is called with (segments there, segments wanted).
        """
        with self.using():
            wanted = self.reclaimer.max_segments()
            if size_bytes is not None:
                wanted = min(wanted, -(-size_bytes // self.segment_bytes))
            have = len(self._segments())
            while have < wanted and self.pool.grow(self.placement.roomiest()) is not None:
                have += 1
                if progress is not None:
                    progress(have, wanted)
            return have

    def stats(self) -> dict[str, Any]:
        """Counters of this process and the state of the store, as plain values; see docs/api.md for the names."""
        with self.using():
            rows = self._segments()
            states = {state.name.lower(): sum(row.state is state for row in rows) for state in SegmentState}
            return {
                **self.counters.snapshot(),
                "capacity_bytes": self.capacity_bytes,
                "physical_bytes": len(rows) * self.segment_bytes
                + self.heat.used_bytes
                + self.catalog.physical_bytes,
                "segment_bytes": self.segment_bytes,
                "segments": states,
                "segments_reclaimed": self.reclaimer.counts.segments,
                "pages_reclaimed": self.reclaimer.counts.pages,
                "catalog": self.catalog.stats(),
                "engine": self._movers.engine_name,
                "transfers": dataclasses.asdict(self._scheduler.stats()),
                "drives": [
                    {
                        "path": str(volume.path),
                        **{op.value: dataclasses.asdict(self.health[op][i].snapshot()) for op in Op},
                    }
                    for i, volume in enumerate(self.volumes)
                ],
                "host_cache": self.cache.stats(),
                "maintainer": self.upkeep.is_maintainer,
            }

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish what is under way, at most `timeout_s`, make it durable and let go of everything. Idempotent."""
        with self._idle:
            if self._closing or self._forked:
                return
            self._closing = True
        deadline = Deadline(timeout_s)
        self._scheduler.close(deadline.left_s)
        self.cache.close(deadline.left_s)  # writes what is dirty, for which the rest is needed
        with self._idle:
            self._closed = True
            if not self._idle.wait_for(lambda: self._active == 0, deadline.left_s):
                log.error(
                    "the store is closed under %d calls that did not end in %g s", self._active, timeout_s
                )
        left_s = max(deadline.left_s, LAST_STEPS_S)
        self.upkeep.stop(left_s)
        with contextlib.ExitStack() as steps:  # runs them all, last first, whatever one raises
            steps.callback(let_go, self)
            steps.callback(self.locks.close)
            steps.callback(close_parts, self.directory, self.locks, self.catalog)
            steps.callback(self.heat.close)
            steps.callback(self.pool.close)
            steps.callback(self._movers.close, left_s)
            if self.config.durability is not Durability.NONE:
                steps.callback(self.pool.sync)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for the parts of the library ---

    @contextlib.contextmanager
    def using(self) -> Iterator[Store]:
        """Keep the store open for the length of a `with`. Raises StoreClosedError."""
        with self._idle:
            if self._forked:
                raise StoreClosedError(f"this store was opened before a fork; {AFTER_FORK}")
            if self._closed:
                raise StoreClosedError("the store is closed", path=str(self.directory.root))
            self._active += 1
        try:
            yield self
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def submit(
        self,
        work: Callable[[Admission], T],
        cls: TransferClass,
        nbytes: int,
        deadline: Deadline,
        otherwise: Callable[[State], T],
        keys: frozenset[object] = NO_KEYS,
    ) -> Future[T]:
        """Run a call in one of the store's workers, when its turn comes; see `Scheduler.submit`."""
        with self.using():
            return self._scheduler.submit(
                lambda job: work(ScheduledAdmission(self._scheduler, job, self.health)),
                cls=cls,
                op=Op.WRITE if cls is TransferClass.OFFLOAD else Op.READ,
                nbytes=nbytes,
                deadline=deadline,
                otherwise=otherwise,
                keys=keys,
            )

    @property
    def writing(self) -> bool:
        """Whether this store saved anything: only then is room made ahead of need."""
        return self._writing

    def _segments(self) -> list[Any]:
        with self.catalog.read() as txn:
            return self.catalog.segments(txn)

    def after_fork_in_child(self) -> None:
        """Give up the copies of the locks, or they would outlive the parent; touch nothing else."""
        self._forked = True
        self._idle = threading.Condition()  # another thread may have held the old one, for ever now
        pool: SegmentPool | None = getattr(
            self, "pool", None
        )  # none yet where another thread was opening the store
        for fd in [*self.locks.fds, *(pool.lock_fds if pool else ())]:
            with contextlib.suppress(OSError):
                os.close(fd)

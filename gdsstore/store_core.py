"""What an open store is made of, and what its parts ask of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self, TypeVar

from gdsstore.catalog.allocate import SegmentPool
from gdsstore.catalog.heat import Heat
from gdsstore.catalog.reclaim import Reclaimer
from gdsstore.catalog.records import SegmentRow
from gdsstore.catalog.state import Locks
from gdsstore.catalog.take import SegmentTaker
from gdsstore.config import AutoOff, Config, Durability, EngineName
from gdsstore.costing import StoreCost
from gdsstore.directory import StoreDirectory, as_paths
from gdsstore.drive_pages import DrivePages
from gdsstore.engines.base import Engine, Op
from gdsstore.errors import ConfigError, StoreClosedError
from gdsstore.movers import Movers
from gdsstore.moving import Moving, Parts
from gdsstore.node_link import NodeLink, connector
from gdsstore.observe.activity import Activity
from gdsstore.observe.counters import Counters
from gdsstore.observe.paths import IoRow, PathTotals
from gdsstore.open_stores import AFTER_FORK, claim, let_go
from gdsstore.opening import close_parts, open_parts
from gdsstore.remote_pages import RemotePages
from gdsstore.sealed_pages import SealedPages
from gdsstore.sealing.cipher import PageCipher
from gdsstore.sealing.key import master_key
from gdsstore.sealing.rules import NO_DEVICE
from gdsstore.sequence import Sequencer
from gdsstore.store_stats import activity_of
from gdsstore.tiers.remote import NodeTier
from gdsstore.transfer.admission import Admission, ScheduledAdmission
from gdsstore.transfer.caps import LearnedCaps
from gdsstore.transfer.plan import AHEAD_CHUNKS
from gdsstore.transfer.policy import NO_KEYS
from gdsstore.transfer.policy_terms import Caps, Limits, State, TransferClass
from gdsstore.transfer.results import CallResult
from gdsstore.transfer.scheduler import Scheduler
from gdsstore.upkeep import Upkeep
from gdsstore.volume.health import NEVER_SICK, Breaker, HealthLimits, watch_volumes
from gdsstore.volume.placement import Placement
from gdsstore.waiting import Deadline
from gdsstore.warm_cache import WarmCache
from gdsstore.warm_pages import WarmPages

if TYPE_CHECKING:
    from gdsstore.device_moving import DeviceMoving

log = logging.getLogger("gdsstore.store")

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0
LAST_STEPS_S = 0.2  # each, when nothing is left of it: enough where nothing hangs


class StoreCore:
    """The part of `Store` that its parts see. Thread-safe."""

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
        key = master_key(config)
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
            self.cipher = None if key is None else PageCipher(key, self.uuid)
            self.volumes, self.catalog, self.capacity_bytes = (
                opened.volumes,
                opened.catalog,
                opened.capacity_bytes,
            )
            undo.callback(close_parts, self.directory, self.locks, self.catalog)
            self.heat = Heat(self.directory.heat, self.segment_bytes)
            undo.callback(self.heat.close)
            found_last = 0 if opened.recovered is None else opened.recovered.last_sequence
            cleared_last = max(self.directory.cleared().values(), default=0)
            self.sequencer = Sequencer(max(found_last, cleared_last), self.heat.sequence)
            self.reclaimer = Reclaimer(
                self.catalog,
                self.volumes,
                self.heat,
                self.segment_bytes,
                self.capacity_bytes,
                config.grace_s,
                self.uuid,
            )
            limits = HealthLimits() if config.drive_breaker is AutoOff.AUTO else NEVER_SICK
            self.health = {
                op: watch_volumes(len(self.volumes), limits, on_open=lambda: self.upkeep.nudge()) for op in Op
            }
            count, chunk_bytes = len(self.volumes), config.chunk_bytes
            self._scheduler = Scheduler(
                Limits(workers=config.workers, offload_budget_s=config.offload_budget_s),
                [Caps(AHEAD_CHUNKS * chunk_bytes, config.volume_ops)] * count,
                LearnedCaps(
                    count, chunk_bytes, AHEAD_CHUNKS, lambda volume, op: self.health[op][volume].healthy
                ),
            )
            self.cost = StoreCost(config, self.counters, self._scheduler.reads)
            self.placement = Placement(self.volumes, self._writable)
            taker = SegmentTaker(
                self.catalog,
                self.volumes,
                self.heat,
                self.placement,
                self.reclaimer,
                self.uuid,
                self.segment_bytes,
            )
            self.pool = SegmentPool(taker, self.placement, on_take=self._room_taken, on_stall=self._stalled)
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
                self.cipher,
            )
            self._movers = Movers(parts, engine)
            self.cache = WarmCache(config, self.volumes[0])
            look = connector(self.uuid, config.pin_host) if config.daemon is AutoOff.AUTO else None
            self.nodes = NodeLink(self.directory.root, look)
            if config.engine is not EngineName.AUTO and engine is None:
                self.moving()  # asked for by name: whether it works is said now
            self.upkeep = Upkeep(self)
            self.upkeep.start()
            self.nodes.look()
            undo.pop_all()

    def moving(self) -> Moving:
        """The parts that move host memory; made by the first call. Raises EngineError, MissingExtraError, VolumeError."""
        return self._movers.host()

    def warm_pages(self, drive: DrivePages | SealedPages) -> WarmPages | None:
        """A namespace's pages in the host cache; None where the store has none. Raises StoreError without memory for it."""
        if not self.config.host_cache:
            return None

        def later(work: Callable[[], None], nbytes: int) -> None:
            deadline = Deadline(self.config.io_deadline_s)
            self.submit(lambda admission: work(), TransferClass.OFFLOAD, nbytes, deadline, lambda state: None)

        return WarmPages(drive, self.cache.namespace(drive), self.cache, self.config.write_policy, later)

    def remote_pages(self, drive: DrivePages | SealedPages) -> RemotePages | None:
        """A namespace's pages in the shared host cache of a node daemon; None where the store looks for none."""
        wanted = self.config.daemon is AutoOff.AUTO and not self.config.host_cache
        # What stands in front of the drives may hold other bytes than those that the checksums are about.
        return RemotePages(self, drive) if wanted and isinstance(drive, DrivePages) else None

    @property
    def node(self) -> NodeTier | None:
        """The node daemon's client; None where no daemon was seen yet. Not for lookups: it looks for one, once a second."""
        return self.nodes.tier

    def device_moving(self, device: int) -> DeviceMoving:
        """The parts that move the memory of a GPU, by its ordinal; made by the first call, which takes seconds.

        Raises ConfigError, DeviceError, EngineError, MissingExtraError: what `path` and `strict` allow cannot be had.
        """
        with self.using():
            if self.cipher is not None:
                raise ConfigError(NO_DEVICE)
            return self._movers.device(device)

    def _writable(self, volume: int) -> bool:
        """A sick volume is not saved to, and a slow one not while another is well."""
        health = self.health[Op.WRITE]
        return health[volume].healthy or (
            health[volume].breaker is Breaker.CLOSED and not any(each.healthy for each in health)
        )

    def _room_taken(self) -> None:
        self._writing = True
        self.upkeep.nudge()

    def _stalled(self, volume: int, what: str, seconds: float) -> None:
        log.error("%s did not %s in %.1f s", self.volumes[volume].path, what, seconds)
        self.health[Op.WRITE][volume].record(ok=False, nbytes=0, seconds=seconds, timed_out=True)

    def sweep(self) -> None:
        """Let go of what belonged to I/O that was stuck and has ended."""
        self._movers.sweep()
        self.cache.sweep()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish what is under way, at most `timeout_s`, make it durable and let go of everything. Idempotent."""
        with self._idle:
            if self._closing or self._forked:
                return
            self._closing = True
        deadline = Deadline(timeout_s)
        self._scheduler.close(deadline.left_s)
        self.cache.close(deadline.left_s)  # writes what is dirty, for which the rest is needed
        self.nodes.report(self.activity)
        self.nodes.close()
        with self._idle:
            self._closed = True
            if not self._idle.wait_for(lambda: self._active == 0, deadline.left_s):
                log.error(
                    "the store is closed under %d calls that did not end in %g s", self._active, timeout_s
                )

        def left_s() -> float:
            return max(deadline.left_s, LAST_STEPS_S)

        self.upkeep.stop(left_s())
        with contextlib.ExitStack() as steps:  # runs them all, last first, whatever one raises
            steps.callback(let_go, self)
            steps.callback(self.locks.close)
            steps.callback(close_parts, self.directory, self.locks, self.catalog)
            steps.callback(self.heat.close)
            steps.callback(lambda: self.pool.close(left_s()))
            steps.callback(lambda: self._movers.close(left_s()))
            if self.config.durability is not Durability.NONE:
                steps.callback(lambda: self.pool.sync(Deadline(left_s())))

    @contextlib.contextmanager
    def using(self) -> Iterator[Self]:
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
        priority: int = 0,
    ) -> Future[T]:
        """Run a call in one of the store's workers, when its turn comes; see `Scheduler.submit`."""
        with self.using():
            return self._scheduler.submit(
                lambda job: work(ScheduledAdmission(self._scheduler, job, self.health)),
                cls=cls,
                op=Op.WRITE if cls is TransferClass.OFFLOAD else Op.READ,
                nbytes=nbytes,
                deadline=deadline,
                otherwise=lambda state: self._counted(otherwise(state)),
                keys=keys,
                priority=priority,
            )

    def io_report(self) -> list[IoRow]:
        """The bytes of `Store.path_report` by class (what for) too, and the requests that moved them."""
        return self._movers.io_report()

    def activity(self) -> Activity:
        """What this process did with the store since it opened it; see `Activity`. It asks no drive, and not the catalog."""
        return activity_of(self, self._scheduler)

    def _counted(self, result: T) -> T:
        """The result of a call that was never begun: who carries one out counts its pages."""
        if isinstance(result, CallResult):
            self.counters.outcome(result.reasons())
        return result

    @property
    def writing(self) -> bool:
        """Whether this store saved anything: only then is room made ahead of need."""
        return self._writing

    def _segments(self) -> list[SegmentRow]:
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

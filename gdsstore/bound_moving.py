"""The calls that move pages of a namespace: save, load, both layer by layer, prefetch."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.drive_pages import Call, DrivePages
from gdsstore.engines.base import Op
from gdsstore.errors import ArgumentError, ConfigError
from gdsstore.layered_calls import LayeredLoad
from gdsstore.layered_plan import LayerPlan
from gdsstore.layered_saves import LayeredSave
from gdsstore.lending import Lent
from gdsstore.memory.device_views import describe_device, on_device
from gdsstore.memory.views import PageMemory, Pages, describe, refuse_shared
from gdsstore.namespace import Keys, Namespace, as_key_array
from gdsstore.prefetch import Prefetch
from gdsstore.sealed_pages import SealedPages
from gdsstore.sealing.identity import SealedNamespace
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.layered_rate import LoadRates
from gdsstore.transfer.pipeline import LayersComputed, OnLayers
from gdsstore.transfer.policy_terms import State, TransferClass
from gdsstore.transfer.results import LoadResult, PageStatus, SaveResult
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.device_moving import DeviceMoving
    from gdsstore.store import Store

log = logging.getLogger("gdsstore.store")

# What becomes of the pages of a call that was never begun.
UNSTARTED_LOAD = {State.EXPIRED: PageStatus.MISS_DEADLINE, State.REFUSED: PageStatus.MISS_BUSY}
UNSTARTED_SAVE = {
    State.EXPIRED: PageStatus.FAILED_DEADLINE,
    State.REFUSED: PageStatus.FAILED_BUSY,
    State.DROPPED: PageStatus.FAILED_DROPPED,
}


class MovingCalls:
    """The part of `BoundNamespace` that moves pages. Thread-safe."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self.namespace = namespace
        cipher = store.cipher
        self.identity = namespace if cipher is None else SealedNamespace(namespace, cipher.key_id)
        self.digest = self.identity.digest
        self._page_bytes = namespace.layout.page_bytes
        self._record_bytes = self.identity.layout.record_bytes
        self._drive = (
            SealedPages(store, namespace, self.identity)
            if isinstance(self.identity, SealedNamespace)
            else DrivePages(store, namespace)
        )
        self._load_rates, self._save_rates = LoadRates(), LoadRates()
        self._warm = store.warm_pages(self._drive)
        self._remote = None if self._warm is not None else store.remote_pages(self._drive)

    def save(self, keys: Keys, pages: Pages, *, deadline_s: float | None = None) -> Future[SaveResult]:
        """Store n pages. The result says for each key SAVED, ALREADY_THERE or FAILED_*.

        `pages`: see `gdsstore.Pages`; each must have the layout's `page_bytes`. The memory must stay as it is until the future
        is done. When it is, the pages are visible (some of them earlier); a key that comes twice is saved once.
        Raises ArgumentError at once where keys and pages do not fit; then nothing was done.
        """
        array = as_key_array(keys)
        memory, moving = self._memory(pages, len(array), writable=False)
        deadline = self._deadline(deadline_s)
        return self._store.submit(
            lambda admission: (self._warm or self._drive).save(
                Call(array, memory, moving, deadline, admission)
            ),
            TransferClass.OFFLOAD,
            len(array) * self._record_bytes,
            deadline,
            lambda state: SaveResult(np.full(len(array), UNSTARTED_SAVE[state], np.uint8)),
        )

    def load(self, keys: Keys, pages: Pages, *, deadline_s: float | None = None) -> Future[LoadResult]:
        """Fetch n pages into the caller's memory. The result says for each key LOADED or MISS_* (and why).

        The memory of a page that missed holds nothing to rely on. Raises ArgumentError as `save` does.
        """
        array = as_key_array(keys)
        memory, moving = self._memory(pages, len(array), writable=True)
        deadline = self._deadline(deadline_s)
        return self._store.submit(
            lambda admission: (self._warm or self._remote or self._drive).load(
                Call(array, memory, moving, deadline, admission)
            ),
            TransferClass.LOAD,
            len(array) * self._record_bytes,
            deadline,
            lambda state: LoadResult(np.full(len(array), UNSTARTED_LOAD[state], np.uint8)),
        )

    def load_layers(
        self,
        keys: Keys,
        pages: Pages,
        on_layers: OnLayers,
        *,
        compute_s_per_layer: float | None = None,
        groups: Sequence[LayerGroup] | None = None,
        deadline_s: float | None = None,
    ) -> Future[LoadResult]:
        """As `load`, layer by layer, so that the forward can begin before the last layers are there.

        `on_layers(first, last, ok)` is called for layers `first` to `last` (not included), in order, from a thread of the store's,
        once they are in the caller's memory for the pages where `ok`, bool (n,), is true. In the end it was called for all
        layers, whatever happened; only of a call that was cancelled before it began it never hears. It must be quick, since the
        load stands still meanwhile, and not wait for other calls of the store's. What it raises is logged. The `open` of a
        `gdsstore.transfer.pipeline.LayerGate` is one to wait with.

        Layers are handed out BEFORE their page is verified: that takes all of its bytes. The result tells, and what was computed
        from a page that missed in it must be thrown away.

        `compute_s_per_layer`: seconds that the forward takes for one layer, where that is known; the layers are grouped by it and
        by what loads took so far. `groups`: take these instead. Pages whose layout has no layers come in one group.
        Raises ArgumentError as `load` does, and for groups that do not fit.
        """
        array = as_key_array(keys)
        memory, moving = self._memory(pages, len(array), writable=True)
        deadline = self._deadline(deadline_s)
        plan = self._plan_layers(self._load_rates, moving, len(array), compute_s_per_layer, groups)
        layered = LayeredLoad(plan, len(array), on_layers)

        def load(admission: Admission) -> LoadResult:
            call = Call(array, memory, moving, deadline, admission)
            cached, layout = self._warm or self._remote, self.namespace.layout
            if cached is None:
                return layered.run(lambda: self._drive.load(call, layered=layered))
            return layered.run(lambda: cached.load_layers(call, layered, layout))

        return self._store.submit(
            load,
            TransferClass.LOAD,
            len(array) * self._record_bytes,
            deadline,
            lambda state: layered.unstarted(UNSTARTED_LOAD[state]),
        )

    def save_layers(
        self,
        keys: Keys,
        pages: Pages,
        computed: LayersComputed,
        *,
        compute_s_per_layer: float | None = None,
        groups: Sequence[LayerGroup] | None = None,
        deadline_s: float | None = None,
    ) -> Future[SaveResult]:
        """As `save`, layer by layer to the drives while the forward goes on, so that little is left to write when it ends.

        `computed` (`gdsstore.transfer.pipeline.LayersComputed`) is the caller's: tell it of each layer that is written to the
        pages' memory and stays as it is until the future is done. Pages become visible at the end, whole. The call holds one of
        the store's workers meanwhile; a forward that never ends it ends at `deadline_s` with FAILED_DEADLINE, as does a cancel with
        FAILED_CANCELLED. It goes past the host cache.

        `compute_s_per_layer`, `groups`: as for `load_layers`. Raises ArgumentError as `save` does, and for groups that do not fit.
        """
        array = as_key_array(keys)
        memory, moving = self._memory(pages, len(array), writable=False)
        deadline = self._deadline(deadline_s)
        plan = self._plan_layers(self._save_rates, moving, len(array), compute_s_per_layer, groups)
        layered = LayeredSave(plan, computed)
        return self._store.submit(
            lambda admission: self._drive.save(Call(array, memory, moving, deadline, admission), layered),
            TransferClass.OFFLOAD,
            len(array) * self._record_bytes,
            deadline,
            lambda state: SaveResult(np.full(len(array), UNSTARTED_SAVE[state], np.uint8)),
        )

    def _plan_layers(
        self,
        rates: LoadRates,
        moving: DeviceMoving | None,
        pages: int,
        compute_s_per_layer: float | None,
        groups: Sequence[LayerGroup] | None,
    ) -> LayerPlan:
        rate = rates.of(None if moving is None else moving.device)
        on_device = moving is not None
        return LayerPlan(self.namespace.layout, rate, pages, compute_s_per_layer, groups, on_device=on_device)

    def prefetch(self, keys: Keys, *, deadline_s: float | None = None, priority: int = 0) -> Prefetch:
        """Start to bring pages into the host cache, for a load that is expected within `deadline_s`. Call it as early as the keys
        are known: the higher `priority` is brought first, then what is needed soonest, and loads go before.

        The earliest pages are usable while later ones still come; a load waits for those that are on their way. Where earlier
        prefetches turned out to be for nothing, only the head of this one is made. Without `host_cache`, the node daemon is asked
        to bring them into its shared one: the prefetch is done when it was asked, and its progress stays 0. Raises ConfigError
        without either, and ArgumentError for keys that are not 32 bytes and priorities that are no whole numbers.
        """
        try:
            priority = operator.index(priority)
        except TypeError:
            raise ArgumentError("priority must be a whole number", given=priority) from None
        warm = self._warm
        if warm is None:
            return self._prefetch_shared(as_key_array(keys), self._deadline(deadline_s), priority)
        array = as_key_array(keys)
        deadline = self._deadline(deadline_s)
        array = array[: self._store.cache.worth_prefetching(len(array))] if len(array) else array
        handle = Prefetch([key.tobytes() for key in array], len(keys))
        digest = self.digest
        handle.begin(
            self._store.submit(
                lambda admission: warm.prefetch(array, deadline, admission, handle),
                TransferClass.PREFETCH,
                len(array) * self._record_bytes,
                deadline,
                lambda state: LoadResult(np.full(len(array), UNSTARTED_LOAD[state], np.uint8)),
                frozenset((digest, key) for key in handle.keys),
                priority,
            )
        )
        warm.prefetches.add(handle)
        return handle

    def _prefetch_shared(self, keys: npt.NDArray[np.uint8], deadline: Deadline, priority: int) -> Prefetch:
        remote = self._remote
        if remote is None or (self._store.node is None and not self._store.nodes.seen):
            raise ConfigError(
                "there is no host cache to prefetch into; set host_cache, or run `gdsstore serve` on this store"
            )
        handle = Prefetch([], len(keys))
        handle.begin(
            self._store.submit(
                lambda admission: remote.prefetch(keys, deadline),
                TransferClass.PREFETCH,
                0,  # the daemon's own scheduler has the bytes
                deadline,
                lambda state: LoadResult(np.full(len(keys), UNSTARTED_LOAD[state], np.uint8)),
                priority=priority,
            )
        )
        return handle

    def hold(self, keys: Keys, owner: str) -> Lent:
        """For the node daemon: lend those of these pages that are in the host cache and on the drives to a process that has
        `Store.shared_memory()` mapped, until what is returned is released. `owner` names that process.

        Only the first ones where much is lent already, to it or to all: see `lending`. None without shared memory. Raises
        ArgumentError for keys that are not 32 bytes.
        """
        array = as_key_array(keys)
        with self._store.using() as store:
            if self._warm is None or store.shared_memory() is None:
                return Lent(None, len(array), self._record_bytes)
            return self._warm.lend(store, array, owner)

    def in_place(self, pages: Pages, count: int) -> npt.NDArray[np.bool_]:
        """Which of `count` pages the drive reads and writes where they are, so that only their memory can be in use after a call;
        the others go through memory of the store's. Shape (n,). Raises ArgumentError as `load` does."""
        memory, moving = self._memory(pages, count, writable=False)
        route = (moving or self._store.moving()).route(Op.READ, self._record_bytes, count)
        return route.mover.in_place(memory, self._record_bytes)

    def _memory(self, pages: Pages, count: int, *, writable: bool) -> tuple[PageMemory, DeviceMoving | None]:
        """Where the pages of a call are, and what moves them; None: what moves host memory, which the call makes itself."""
        if not on_device(pages):
            memory = describe(pages, count, self._page_bytes, writable=writable)
            if writable:
                refuse_shared(memory)
            return memory, None
        found = describe_device(pages, count, self._page_bytes, writable=writable)
        with self._store.using():
            moving = self._store.device_moving(found.device)
            moving.check_page(self._record_bytes)
            memory = moving.memory_of(found)
            if writable:
                refuse_shared(memory)
            return memory, moving

    def _deadline(self, deadline_s: float | None) -> Deadline:
        return Deadline(self._store.config.io_deadline_s if deadline_s is None else deadline_s)

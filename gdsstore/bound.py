"""A namespace of an open store: the calls that look up, save, load and delete its pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.keys import index_keys
from gdsstore.costing import leading
from gdsstore.drive_pages import Call, DrivePages
from gdsstore.engines.base import Op
from gdsstore.errors import ConfigError
from gdsstore.layered_calls import LayeredLoad
from gdsstore.memory.device_views import describe_device, on_device
from gdsstore.memory.views import PageMemory, Pages, describe
from gdsstore.namespace import Keys, Namespace, as_key_array
from gdsstore.prefetch import Prefetch
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.cost import Advice, CostSetting
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.layered_rate import LoadRates
from gdsstore.transfer.pipeline import OnLayers
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

T = TypeVar("T")


class BoundNamespace:
    """Pages of one namespace. Made by `Store.namespace`; thread-safe; lives as long as its store is open."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self.namespace = namespace
        self.digest = namespace.digest
        self._page_bytes = namespace.layout.page_bytes
        self._record_bytes = namespace.layout.record_bytes
        self._drive = DrivePages(store, namespace)
        self._rates = LoadRates()
        self._warm = store.warm_pages(self._drive)

    # --- looking up: memory only, microseconds ---

    def lookup(self, keys: Keys) -> int:
        """How many pages from the start are stored, up to the first that is not; with `cost_model` = enforce, only as many as
        are worth their load.

        What was found stays loadable for `grace_s`. Raises ArgumentError for keys that are not 32 bytes.
        """
        found = self._present(keys, prefix=True)
        pages = leading(found)
        if pages == 0 or self._store.cost.setting is CostSetting.OFF:
            return pages
        warm = 0 if self._warm is None else leading(self._warm.contains(as_key_array(keys)[:pages]))
        sizes = self._record_bytes, self.namespace.layout.page_tokens
        return self._store.cost.worth_loading(pages, warm, len(found), *sizes)

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key whether its page is stored. Shape (n,)."""
        return self._present(keys, prefix=False)

    def advise(
        self,
        pages: int,
        *,
        rest_tokens: int = 0,
        cached_tokens: int = 0,
        wait_s: float = 0.0,
        queued_bytes: int = 0,
    ) -> Advice:
        """How many of a hit's first `pages` pages are worth their load from the drives; see docs/api.md.

        `cached_tokens`: before the hit, and there already. `rest_tokens`: behind it, computed in any case. `wait_s`: seconds until
        the request could be computed at all. `queued_bytes`: of prefetches that go first; the store knows of the loads itself.
        Raises ArgumentError where the layout does not say how many tokens a page holds.
        """
        return self._store.cost.advise(
            pages,
            self._record_bytes,
            self.namespace.layout.page_tokens,
            rest_tokens=rest_tokens,
            cached_tokens=cached_tokens,
            wait_s=wait_s,
            queued_bytes=queued_bytes,
        )

    def _present(self, keys: Keys, *, prefix: bool) -> npt.NDArray[np.bool_]:
        array = as_key_array(keys)
        index, tag = index_keys(array, self.digest)
        warm = self._warm if self._warm is not None and self._warm.holds_unwritten else None
        with self._store.using() as store:
            where = store.catalog.present(index, tag, prefix=prefix and warm is None)
            segment, slot = where.segment[where.found], where.slot[where.found]
            store.heat.touch(segment, slot)
            store.heat.looked_up(segment)  # what is reported now stays loadable for the grace period
            found = where.found if warm is None else where.found | warm.contains(array)
            hits = int(np.count_nonzero(found))
            store.counters.looked_up(hits, len(index) - hits)
            return found

    # --- moving ---

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
            lambda admission: (self._warm or self._drive).load(
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
        """As `load`, layer by layer from the drives, so that the forward can begin before the last layers are there.

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
        rate = self._rates.of(None if moving is None else moving.device)
        layered = LayeredLoad(
            self.namespace.layout,
            rate,
            len(array),
            on_layers,
            compute_s_per_layer,
            groups,
            on_device=moving is not None,
        )

        def load(admission: Admission) -> LoadResult:
            call = Call(array, memory, moving, deadline, admission)
            return layered.run(lambda: self._drive.load(call, layered=layered))

        return self._store.submit(
            load,
            TransferClass.LOAD,
            len(array) * self._record_bytes,
            deadline,
            lambda state: layered.unstarted(UNSTARTED_LOAD[state]),
        )

    def prefetch(self, keys: Keys, *, deadline_s: float | None = None) -> Prefetch:
        """Start to bring pages into the host cache, for a load that is expected within `deadline_s`. Call it as early as the keys
        are known: what is needed soonest is brought first, and loads go before.

        The earliest pages are usable while later ones still come; a load waits for those that are on their way. Where earlier
        prefetches turned out to be for nothing, only the head of this one is made. Raises ConfigError without `host_cache`.
        """
        warm = self._warm
        if warm is None:
            raise ConfigError("there is no host cache to prefetch into; set host_cache")
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
            )
        )
        warm.prefetches.add(handle)
        return handle

    def in_place(self, pages: Pages, count: int) -> npt.NDArray[np.bool_]:
        """Which of `count` pages the drive reads and writes where they are, so that only their memory can be in use after a call;
        the others go through memory of the store's. Shape (n,). Raises ArgumentError as `load` does."""
        memory, moving = self._memory(pages, count, writable=False)
        route = (moving or self._store.moving()).route(Op.READ, self._record_bytes, count)
        return route.mover.in_place(memory, self._record_bytes)

    def _memory(self, pages: Pages, count: int, *, writable: bool) -> tuple[PageMemory, DeviceMoving | None]:
        """Where the pages of a call are, and what moves them; None: what moves host memory, which the call makes itself."""
        if not on_device(pages):
            return describe(pages, count, self._page_bytes, writable=writable), None
        found = describe_device(pages, count, self._page_bytes, writable=writable)
        with self._store.using():
            moving = self._store.device_moving(found.device)
            moving.check_page(self._record_bytes)
            return moving.memory_of(found), moving

    def _deadline(self, deadline_s: float | None) -> Deadline:
        return Deadline(self._store.config.io_deadline_s if deadline_s is None else deadline_s)

    # --- deleting ---

    def delete(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Drop pages. Returns for each key whether there was one to drop. Their space comes back with their segment.

        Raises DeadlineError where one is being written to a drive that hangs: then they may still be there.
        """
        array = as_key_array(keys)
        index, tag = index_keys(array, self.digest)
        with self._store.using() as store:
            warm = None if self._warm is None else self._warm.drop(array, self._deadline(None))
            gone = self._drive.remove(index, store.catalog.resolve(index, tag))
            if self._warm is None or warm is None:
                return gone
            # Again: what was read from the drive until a moment ago.
            return gone | warm | self._warm.drop(array, self._deadline(None))

    def clear(self) -> int:
        """Drop all pages of this namespace. Returns how many there were on the drives."""
        with self._store.using() as store:
            if self._warm is not None:
                self._warm.clear(self._deadline(None))
            store.directory.describe_namespace(self.namespace)  # the mark is kept with it
            store.directory.mark_cleared(self.digest, store.sequencer.take())
            dropped = 0
            with store.catalog.read() as txn:
                rows = store.catalog.segments(txn)
            for row in rows:
                with store.catalog.write(pages=row.filled) as txn:
                    dropped += store.catalog.drop_pages(txn, row.segment_id, self.digest)
            if self._warm is not None:
                self._warm.clear(self._deadline(None))  # what was read from the drives until a moment ago
            return dropped

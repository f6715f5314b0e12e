"""The direct linker: SGLang's device pools (L1) <-> a gdsstore on this machine's drive, with no host tier between.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "GdsStoreLinker", "linker_module_path": "sglang_backend.linker",
        "linker_extra_config": {"path": "/mnt/nvme0/kv", "capacity": "2TiB", "host_cache": "64GiB"}}'

SGLang calls everything on its scheduler thread (tests/sglang_cpu/contracts.md). The rules kept here: look-ups come from memory;
loads, offloads and prefetches are queued, and a thread each sees to them; nothing that a rank decides depends on what only this
rank knows; a page that did not load is a miss from then on; nothing but a wrong configuration, at start, raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
    device_module,
)

from gdsstore import GdsStoreError
from sglang_backend import stores
from sglang_backend.device_pools_resolve import resolve
from sglang_backend.linker_identity import draft_model_of, model_of, this_rank
from sglang_backend.linker_loads import Loads
from sglang_backend.linker_lookup import Lookup
from sglang_backend.linker_offloads import Offloads
from sglang_backend.linker_options import parse_linker_options
from sglang_backend.linker_pools import bind
from sglang_backend.linker_prefetch import Prefetched, Prefetches
from sglang_backend.linker_sessions import Sessions
from sglang_backend.server import server_args as resolved_server_args
from sglang_backend.weight_updates import Weights

log = logging.getLogger("gdsstore.sglang")

SHARE_PENDING, LEAST_PENDING = 4, 64  # a quarter of the KV pool's pages may wait to be stored
CLOSE_S = 10.0
SAY_AGAIN_S = 10.0


class GdsStoreLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang has no types
    """One a rank. Made by SGLang's linker factory; raises ConfigError, StoreError, VolumeError, EngineError or DeviceError where it
    cannot work."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[ComponentType],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any | None = None,
    ) -> None:
        self.forward_stream = forward_stream
        self._closed, self._said = False, -SAY_AGAIN_S
        self._weights = Weights("Restart the server")
        resolved = resolve(params, components)
        options = parse_linker_options(extra_config, on_device=resolved.device is not None)
        arguments = resolved_server_args() or server_args
        model, rank = model_of(options.weights, arguments), this_rank(params, arguments)
        drafts = any(pool.draft for pool in resolved.pools)
        draft_model = draft_model_of(options.draft_weights, arguments) if drafts else ()
        self._store = stores.acquire(options.paths, options.config)
        try:
            if resolved.device is not None:
                self._store.device_moving(resolved.device)  # seconds, and what is missing is said at start
            self.stored = bind(self._store, model, rank, resolved, draft_model)
        except BaseException:
            stores.release(self._store, CLOSE_S)
            raise
        self.pools = {PoolName(stored.pool.name): stored.pool for stored in self.stored}
        self.layer_done_counter = LayerWiseLoadCounter(resolved.layers)
        if PoolName.MAMBA in self.pools:  # SGLang registers the counter with the KV pool only
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        kv = resolved.pools[0]
        backlog = options.backlog_pages or max(
            kv.buffers.rows // kv.page_rows // SHARE_PENDING, LEAST_PENDING
        )
        self.lookups = Lookup(self.stored, options.config.grace_s)
        streams: tuple[int, ...] = ()
        if resolved.device is not None and forward_stream is not None:
            streams = (int(forward_stream.cuda_stream),)
        self.loads = Loads(
            self.stored, resolved.layers, self.layer_done_counter, options.load_deadline_s, streams
        )
        sessions = Sessions(self._store)
        self.offloads = Offloads(self.stored, backlog, options.offload_deadline_s, sessions)
        self.prefetches = (
            Prefetches(self.stored, options.prefetch_deadline_s) if options.config.host_cache else None
        )

    # --- look up ---

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        if self._weights.changed:  # as on every rank: SGLang updates them in the same step
            return []
        try:
            lengths = self.lookups.lengths(rid, transfers)
            if lengths and self.prefetches is not None:
                self.prefetches.want(rid, transfers, lengths[-1])
            return lengths
        except Exception:  # an answer of nothing: the ranks go on together, and the pages are computed
            now = time.monotonic()
            if now - self._said >= SAY_AGAIN_S:  # each waiting request asks in each step
                self._said = now
                log.exception("a look-up failed and counts as nothing found")
            return []

    # --- load ---

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        self.lookups.forget(rid)
        prefetched = None if self.prefetches is None else self.prefetches.load_begins(rid)
        queued = not self._weights.changed and self.loads.queue(rid, transfers, prefetched)
        if not queued:
            self._give_up(prefetched)
        return queued

    def cancel_queued_load(self, rid: str) -> bool:
        cancelled, prefetched = self.loads.cancel(rid)
        self._give_up(prefetched)
        return cancelled

    def _give_up(self, prefetched: Prefetched | None) -> None:
        if prefetched is not None and self.prefetches is not None:
            self.prefetches.give_up(prefetched)

    def start_layer_wise_loading(self) -> int:
        return self.loads.start(self._indices_ready)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.loads.finish(counter_index)

    def _indices_ready(self) -> Sequence[Any]:
        """Rows that SGLang hands out are free for what comes after on its stream; on that of its forwards: see Loads."""
        ready = device_module.Event()
        ready.record()
        return [ready]

    # --- offload ---

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        if self._weights.changed:
            return False
        return self.offloads.offload(transfers, self.record_offload_ready, session_id)

    def num_completed_offloads(self) -> int:
        return self.offloads.completed()

    def pop_completed_offload(self) -> bool:
        return self.offloads.pop()

    # --- the rest ---

    def reset(self) -> None:
        """Return when nothing touches the device pools any more. What is stored stays."""
        self.loads.reset()
        self.offloads.reset()
        self.lookups.clear()
        if self.prefetches is not None:
            self.prefetches.reset()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """End the threads and close the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.loads.close()
        self.offloads.close()
        if self.prefetches is not None:
            self.prefetches.close()
            log.info(
                "prefetches: of %d requests; %d pages asked for, %d brought, %d failed; %d of the loads' pages came from there",
                self.prefetches.requests,
                self.prefetches.pages_asked,
                self.prefetches.pages_brought,
                self.prefetches.pages_failed,
                self.loads.pages_warm,
            )
        self.layer_done_counter.reset()
        log.info(
            "linker: %d pages loaded, %d not; %d saved, %d not, %d dropped",
            self.loads.pages_loaded,
            self.loads.pages_failed,
            self.offloads.pages_saved,
            self.offloads.pages_failed,
            self.offloads.pages_dropped,
        )
        try:
            stores.release(self._store, CLOSE_S)
        except GdsStoreError as error:
            log.error("the store did not close cleanly: %s", error)

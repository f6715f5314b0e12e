"""The HiCache storage backend: SGLang's host pools (L2) <-> a gdsstore on this machine's drive (L3).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "gdsstore",
        "module_path": "sglang_backend.storage", "class_name": "GdsStoreHiCache", "interface_v1": 1,
        "path": "/mnt/nvme0/kv", "capacity": "500GiB"}'

SGLang calls from its scheduler thread and from three storage threads (tests/sglang_cpu/contracts.md). The rules kept here: a call
returns within `call_limit_s`, as misses if need be; when it has returned nothing touches the host pool any more; nothing but a
wrong configuration, at attach, raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from gdsstore import ArgumentError, BoundNamespace, GdsStoreError, Pieces
from sglang_backend import hits, stores
from sglang_backend.identity import Model, identify_model
from sglang_backend.options import parse_options
from sglang_backend.registry import PoolRegistry
from sglang_backend.server import server_args
from sglang_backend.stats import TransferStats
from sglang_backend.traffic import Order, Traffic
from sglang_backend.weight_updates import Weights

log = logging.getLogger("gdsstore.sglang")

T = TypeVar("T")
Move: TypeAlias = Callable[[Sequence[Order]], dict[str, list[bool]]]
KV = str(PoolName.KV)
SAY_AGAIN_S = 10.0
AFTER_AN_UPDATE = 'Detach the backend and attach it with "weights" naming the new ones, or restart the server'


class GdsStoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """One a rank. Made by SGLang's backend factory; raises ConfigError, StoreError or VolumeError where it cannot work."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        options = parse_options(storage_config.extra_config)
        self._weights = Weights(AFTER_AN_UPDATE)
        self._model: Model = identify_model(storage_config.model_name, options.weights, server_args())
        self._store = stores.acquire(options.paths, options.config)
        self._pools = PoolRegistry(self._store, storage_config, self._model)
        # Which of its two interfaces SGLang moves KV pages through; it looks them up through `batch_exists` with both.
        self._flat_pages = not (storage_config.extra_config or {}).get("interface_v1")
        if self._flat_pages:
            log.warning('SGLang copies each page twice without "interface_v1": 1 in the extra config')
        self._stats = TransferStats() if storage_config.enable_storage_metrics else None
        self._limit_s = options.call_limit_s
        self._traffic = Traffic(options.call_limit_s, options.config.io_deadline_s, self._stats)
        self._said: dict[str, float] = {}  # when a kind of failure was logged
        self._closing = threading.Lock()
        self._closed = False

    # --- pools, at attach ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools.register(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.register(host_pool, str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Raises ConfigError or ArgumentError for a set of pools that this backend does not know how to keep whole; it is closed
        then, since SGLang does not."""
        try:
            self._pools.check()
        except GdsStoreError:
            self.close()
            raise

    # --- v1: KV pages ---

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._guard("a look-up", 0, lambda: self._kv().lookup(_raw(keys)) if self._usable() else 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get({KV: (keys, host_indices)})[KV]

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._set({KV: (keys, host_indices)})[KV]

    # --- v2: the pools beside it ---

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return self._guard(
            "a look-up", PoolTransferResult.empty(), lambda: self._exists_v2(keys, pool_transfers or [])
        )

    def _exists_v2(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        if not keys or not self._usable():
            return PoolTransferResult(0, {}, [])
        raw = _raw(keys)
        kv_pages = self._kv().lookup(raw)
        raw = raw[:kv_pages]
        found = {KV: kv_pages} if kv_pages else {}
        masks = [np.ones(kv_pages, np.bool_)]
        for transfer in transfers if kv_pages else ():
            name = str(transfer.name)
            # A second form of KV pages, which never limits the others.
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                present = self._pools.bound(name).contains(_raw(transfer.keys or []))
                covered = hits.block_groups(present, transfer.block_pages, transfer.group_pages)
                found |= {name: min(covered, kv_pages)} if covered else {}
                continue
            present = self._pools.bound(name).contains(raw)
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                mask = hits.trailing_pages(present, len(transfer.keys or ()))
            else:
                mask = hits.all_pages(present)
            found |= {name: hits.longest(mask)} if mask.any() else {}
            masks.append(mask)
        restorable = hits.together(masks)
        return PoolTransferResult(restorable[-1] if restorable else 0, found, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._get({str(each.name): (each.keys or [], each.host_indices) for each in transfers})

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._set({str(each.name): (each.keys or [], each.host_indices) for each in transfers})

    def _get(self, wanted: dict[str, tuple[list[str], Any]]) -> dict[str, list[bool]]:
        return self._move("a read", wanted, self._traffic.load)

    def _set(self, given: dict[str, tuple[list[str], Any]]) -> dict[str, list[bool]]:
        return self._move("a write", given, self._traffic.save)

    def _move(self, what: str, pages: dict[str, tuple[list[str], Any]], move: Move) -> dict[str, list[bool]]:
        nothing = {name: [False] * len(keys) for name, (keys, _) in pages.items()}
        done = self._guard(what, nothing, lambda: move(self._orders(pages)) if self._usable() else nothing)
        return nothing if self._weights.changed else nothing | done  # meanwhile, perhaps

    def _orders(self, wanted: dict[str, tuple[list[str], Any]]) -> list[Order]:
        return [
            Order(
                name,
                self._pools.bound(name),
                _raw(keys),
                self._pools[name].pieces(indices, len(keys)),
                self._pools[name],
            )
            for name, (keys, indices) in wanted.items()
            if keys
        ]

    # --- flat pages: the interface without `interface_v1` ---

    def exists(self, key: str) -> bool:
        return self._guard(
            "a look-up", False, lambda: self._usable() and bool(self._kv().contains(_raw([key]))[0])
        )

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The tensors that were filled; None for a page that missed."""
        targets = list(target_locations or ())
        loaded = self._flat("a read", keys, targets, self._traffic.load)
        if not any(loaded):
            return [None] * len(keys)
        return [target if ok else None for target, ok in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._flat("a write", keys, list(values or ()), self._traffic.save))

    def _flat(
        self,
        what: str,
        keys: list[str],
        tensors: list[Any],
        move: Move,
    ) -> list[bool]:
        nothing = [False] * len(keys)

        def work() -> list[bool]:
            if not keys or not self._usable():
                return nothing
            if len(tensors) != len(keys) or any(tensor is None for tensor in tensors):
                raise ArgumentError(f"{len(keys)} keys need a tensor each")
            kept = [tensor.contiguous() for tensor in tensors]
            if move == self._traffic.load and any(a is not b for a, b in zip(kept, tensors, strict=True)):
                raise ArgumentError("a page cannot be read into a tensor that is not contiguous")
            address = np.array([tensor.data_ptr() for tensor in kept], np.uint64)
            length = np.array([tensor.numel() * tensor.element_size() for tensor in kept], np.int64)
            pieces = Pieces(address, length, owner=kept)
            return move([Order(KV, self._pools.flat(), _raw(keys), pieces, None)])[KV]

        done = self._guard(what, nothing, work)
        return nothing if self._weights.changed else done

    # --- the rest ---

    def clear(self) -> bool:
        """Drop this server's pages (of this rank), and no others that share the store."""

        def work() -> bool:
            if self._closed:
                return False
            self._pools.clear()
            return True

        return self._guard("clear", False, work)

    def get_stats(self) -> StorageMetrics | None:
        """SGLang's metrics since the last call; called in every scheduler step."""
        if self._stats is None:
            return None
        taken = self._stats.take()
        return StorageMetrics(
            prefetch_pgs=taken.prefetch_pgs,
            backup_pgs=taken.backup_pgs,
            prefetch_bandwidth=taken.prefetch_bandwidth,
            backup_bandwidth=taken.backup_bandwidth,
        )

    def close(self) -> None:
        """Wait for calls under way, then close the store. Later calls find nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._traffic.wait_until_idle()
        try:
            stores.release(self._store, self._limit_s)
        except GdsStoreError as error:
            log.error("the store did not close cleanly: %s", error)

    def _kv(self) -> BoundNamespace:
        return self._pools.flat() if self._flat_pages else self._pools.bound(KV)

    def _usable(self) -> bool:
        return not self._closed and not self._weights.changed and not self._traffic.stuck

    def _guard(self, what: str, otherwise: T, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:  # whatever it is: a miss, never the end of a storage thread
            now = time.monotonic()
            if (
                now - self._said.get(what, -SAY_AGAIN_S) >= SAY_AGAIN_S
            ):  # what fails once may fail in every call
                self._said[what] = now
                log.exception("%s failed and counts as nothing found", what)
            else:
                log.debug("%s failed again: %s", what, error)
            return otherwise


def _raw(keys: Sequence[str]) -> npt.NDArray[np.uint8]:
    """SGLang's keys, 64 hex digits each, as uint8 (n, 32). Raises ArgumentError for anything else."""
    try:
        return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(len(keys), 32)
    except ValueError as error:
        raise ArgumentError("a page key must be 64 hex digits, as SGLang makes them") from error

"""The host pools of one backend, and the namespace of each."""

from __future__ import annotations

import logging
from typing import Any

from gdsstore import BoundNamespace, ConfigError, GdsStoreError, Store
from sglang_backend.identity import Model, namespace_of
from sglang_backend.pools import HostPool, describe_pool

log = logging.getLogger("gdsstore.sglang")

KV = "kv"
DRAFT = "draft"
# Pools whose pages this backend has been tested with. Another one may need more than its bytes to be restored, and a hit without
# it would be silent garbage: it is refused.
KNOWN = (KV, "swa", "auxiliary_swa", "mamba", "indexer", DRAFT, "draft_indexer", "draft_swa")


class PoolRegistry:
    """Filled on the scheduler thread at attach, read by all; a pool that comes later is added by replacing the tables."""

    def __init__(self, store: Store, config: Any, model: Model) -> None:
        self._store, self._config, self._model = store, config, model
        self._pools: dict[str, HostPool] = {}
        self._bound: dict[str, BoundNamespace] = {}
        self._flat: BoundNamespace | None = None
        self._refused: dict[str, GdsStoreError] = {}

    def register(self, pool: Any, name: str) -> None:
        """Take a pool, or note why not: SGLang takes an answer only in `check`, and a pool that comes later must not end the server
        (what nobody can look up is a miss)."""
        try:
            self._add(describe_pool(pool, name))
        except GdsStoreError as error:
            log.error("pool %s is not stored: %s", name, error)
            self._refused[name] = error

    def _add(self, pool: HostPool) -> None:
        if pool.name not in KNOWN:
            raise ConfigError(
                f"gdsstore does not know the pool {pool.name!r} of this model, and will not guess how to restore it; known: "
                f"{', '.join(KNOWN)}. Run this model without --hicache-storage-backend"
            )
        namespace = namespace_of(self._model, self._config, pool)
        bound = self._store.namespace(namespace)
        self._pools = {**self._pools, pool.name: pool}
        self._bound = {**self._bound, pool.name: bound}
        if pool.name == KV:
            self._flat = self._store.namespace(namespace_of(self._model, self._config, pool, flat=True))
        log.info(
            "pool %s: %d pages of %d bytes, %s",
            pool.name,
            pool.pages,
            pool.page_bytes,
            namespace.digest.hex(),
        )

    def check(self) -> None:
        """The set as a whole, when it is complete. Raises ConfigError, or why a pool was refused."""
        for error in self._refused.values():
            raise error
        if KV not in self._pools:
            raise ConfigError("SGLang registered no KV pool")
        if not self._config.is_mla_model or self._config.tp_size == 1:
            return
        for name, pool in self._pools.items():
            if (
                name.startswith(DRAFT)
                and hasattr(pool.pool, "head_num")
                and not hasattr(pool.pool, "kv_lora_rank")
            ):
                # Only rank 0 is asked to write, but every rank holds other heads.
                raise ConfigError(
                    f"pool {name!r}: a draft model with attention heads beside an MLA model has other bytes on every rank, and "
                    "SGLang stores those of rank 0 only; run it without --hicache-storage-backend or without the draft model"
                )

    def __getitem__(self, name: str) -> HostPool:
        return self._pools[name]

    def bound(self, name: str) -> BoundNamespace:
        """Raises ConfigError for a pool that was not registered."""
        if name not in self._bound:
            raise ConfigError(f"pool {name!r} was not registered")
        return self._bound[name]

    def flat(self) -> BoundNamespace:
        if self._flat is None:
            raise ConfigError("SGLang registered no KV pool")
        return self._flat

    def clear(self) -> None:
        """Drop the pages of all pools."""
        for bound in {
            id(each): each for each in (*self._bound.values(), self._flat) if each is not None
        }.values():
            bound.clear()

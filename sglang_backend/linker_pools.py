"""The device pools of one rank, each with the namespace in which its pages are stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore import ArgumentError, BoundNamespace, Store
from sglang_backend.device_pools import DevicePool
from sglang_backend.device_pools_resolve import DevicePools
from sglang_backend.identity import Model
from sglang_backend.linker_identity import Rank, namespace_of_pool
from sglang_backend.linker_quarantine import Quarantine, short
from sglang_backend.server_facts import Facts

log = logging.getLogger("gdsstore.sglang")

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredPool:
    """`writes`: whether this rank is the one that stores its pages."""

    pool: DevicePool
    bound: BoundNamespace
    writes: bool
    quarantine: Quarantine = field(default_factory=Quarantine)

    def hold(self, lost: U8) -> None:
        """These did not load: what the store still has of them is a miss from now on; all, where it cannot tell."""
        kept = lost
        try:
            kept = lost[self.bound.contains(lost)]
        except Exception:
            log.exception("it cannot be told which pages of pool %s are left", self.pool.name)
        self.quarantine.add(kept)


def bind(
    store: Store, model: Model, rank: Rank, pools: DevicePools, draft_model: Facts = ()
) -> tuple[StoredPool, ...]:
    """`draft_model`: what tells it apart, for the pools that hold its bytes."""
    bound = []
    for pool in pools.pools:
        namespace = namespace_of_pool(model, rank, pools, pool, draft_model)
        bound.append(
            StoredPool(pool, store.namespace(namespace), writes=rank.writes_shared or not pool.replicated)
        )
        log.info(
            "pool %s of %s: pages of %d bytes in %d pieces, namespace %s",
            pool.name,
            pool.kind,
            pool.layout.page_bytes,
            len(pool.buffers.base),
            namespace.digest.hex(),
        )
    return tuple(bound)


def raw_keys(keys: Sequence[str]) -> U8:
    """SGLang's keys, 64 hex digits each, as uint8 (n, 32). Raises ArgumentError for anything else."""
    try:
        return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(len(keys), 32)
    except ValueError as error:
        raise ArgumentError("a page key must be 64 hex digits, as SGLang makes them") from error


def among(keys: U8, others: Sequence[U8]) -> npt.NDArray[np.bool_]:
    """Which of the keys are among others, as `short` tells. Shape (n,)."""
    if len(others) == 0:
        return np.zeros(len(keys), np.bool_)
    return np.asarray(np.isin(short(keys), short(np.concatenate(others))), np.bool_)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages of one SGLang pool that are to be moved: keys, and the tensor of their device indices."""

    source: str
    keys: Sequence[str]
    indices: Any

    @classmethod
    def of(cls, transfers: Sequence[Any], *, copy: bool) -> tuple[Wanted, ...]:
        """`transfers`: SGLang's PoolTransfers. `copy`: the indices are needed for longer than SGLang promises to keep them."""
        return tuple(
            cls(
                str(transfer.name.value),
                list(transfer.keys),
                transfer.device_indices.clone() if copy else transfer.device_indices,
            )
            for transfer in transfers
            if transfer.keys and transfer.device_indices is not None
        )

"""Backends, host pools and page keys in sizes that suit a unit test."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_fixtures
import torch
from cpu_fixtures import MHA, MLA, device_pool, host_pool
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from sglang_backend.storage import GdsStoreHiCache

KV = "kv"
NAMES = {
    "backend_name": "gdsstore",
    "module_path": "sglang_backend.storage",
    "class_name": "GdsStoreHiCache",
}
# Small segments, little memory, no upkeep behind the test's back.
SETTINGS: dict[str, Any] = {
    "interface_v1": 1,
    "weights": "test",
    "capacity": "64MiB",
    "segment_bytes": "1MiB",
    "engine": "posix",
    "posix_threads": 2,
    "workers": 4,
    "staging_bytes": "4MiB",
    "chunk_bytes": "256KiB",
    "huge_pages": "off",
    "free_segments": 0,
    "catalog_map_bytes": "64MiB",
    "maintain_interval_s": 3600,
}
LAYOUTS = [
    (MHA, "layer_first"),
    (MHA, "page_first"),
    (MHA, "page_first_direct"),
    (MHA, "page_head"),
    (MLA, "layer_first"),
    (MLA, "page_first"),
    (MLA, "page_first_direct"),
]

_salts = itertools.count()


def extra_config(folder: Path, **settings: Any) -> dict[str, Any]:
    """As the backend gets it. A setting that is None is left out."""
    given = {**NAMES, "path": str(folder), **SETTINGS, **settings}
    return {name: value for name, value in given.items() if value is not None}


def make_backend(
    folder: Path, pools: Sequence[Any], facts: dict[str, Any], settings: dict[str, Any]
) -> GdsStoreHiCache:
    """Attached with `pools`: the KV pool, then pairs of name and pool. `facts`: fields of HiCacheStorageConfig."""
    config = dataclasses.replace(cpu_fixtures.storage_config(**extra_config(folder, **settings)), **facts)
    backend = GdsStoreHiCache(config, {})
    try:
        for number, pool in enumerate(pools):
            if number == 0:
                backend.register_mem_pool_host(unfilled(pool))
            else:
                name, sidecar = pool
                backend.register_mem_host_pool_v2(unfilled(sidecar), name)
        if pools:
            backend.on_host_pools_registered()
    except BaseException:
        backend.close()
        raise
    return backend


def unfilled(pool: Any) -> Any:
    return pool.pool if isinstance(pool, FilledPool) else pool


def make_keys(count: int, salt: object = None) -> list[str]:
    """Page keys as SGLang makes them, 64 hex digits; without a salt such as no other call has."""
    salt = next(_salts) if salt is None else salt
    return [hashlib.sha256(f"{salt}-{i}".encode()).hexdigest() for i in range(count)]


def raw_keys(keys: Sequence[str]) -> Any:
    import numpy as np

    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(len(keys), 32)


class FilledPool:
    """A host pool full of random bytes. Pages are counted from the start of the pool, and none is a neighbour of the next."""

    def __init__(self, kind: str, layout: str, pages: int = 8) -> None:
        self.pool = host_pool(device_pool(kind), layout)
        self.page_size = self.pool.page_size
        self.pool.kv_buffer.view(torch.uint8).random_(0, 256)
        self.starts = [2 * page * self.page_size for page in range(pages)]
        self.keys = make_keys(pages)
        self.truth = self.pages()

    def indices(self, pages: Sequence[int] | None = None, *, beside: int = 0) -> torch.Tensor:
        """Host indices of some pages (all), or of those `beside` pages behind them."""
        starts = [self.starts[page] for page in (range(len(self.starts)) if pages is None else pages)]
        first = torch.tensor(starts) + beside * self.page_size
        return (first[:, None] + torch.arange(self.page_size)).flatten()

    def pages(self, *, beside: int = 0) -> list[torch.Tensor]:
        return [
            self.pool.get_data_page(start + beside * self.page_size).clone().view(torch.uint8)
            for start in self.starts
        ]

    def wipe(self) -> None:
        self.pool.kv_buffer.view(torch.uint8).fill_(0xEE)

    def holds_truth(self, *, beside: int = 0) -> list[bool]:
        """For each page whether it is what it was at first."""
        return list(map(torch.equal, self.pages(beside=beside), self.truth))

    def transfer(self, name: PoolName, pages: Sequence[int] | None = None, **more: Any) -> PoolTransfer:
        keys = self.keys if pages is None else [self.keys[page] for page in pages]
        return PoolTransfer(name=name, host_indices=self.indices(pages), keys=keys, **more)


def saved(backend: Any, filled: FilledPool) -> FilledPool:
    """Store all pages of the pool, then wipe it."""
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True] * len(filled.keys)
    filled.wipe()
    return filled

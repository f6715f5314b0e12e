"""The smallest complete ``HiCacheStorage``: one file a page. For testing the harness only.

It implements all three interfaces SGLang 0.5.23 may use (v1, v2, and the older get/set calls) and
counts its calls by method and thread, so tests can see which ones SGLang chose. There is no
checksum, no capacity limit and no batching: the harness relies on damaged pages being served.
"""

import ctypes
import os
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

Segment = tuple[int, int]
"""Address and size in bytes of one contiguous piece of a page in the host pool."""


def page_segments(
    keys: Sequence[str], host_indices: torch.Tensor, host_pool: Any
) -> Iterator[tuple[str, list[Segment]]]:
    """Pair each key with the segments of its page.

    ``get_page_buffer_meta`` returns one flat list for all pages; every page has the same number
    of segments (contracts.md, "Layouts").
    """
    if not keys:
        return
    addresses, sizes = host_pool.get_page_buffer_meta(host_indices)
    per_page, remainder = divmod(len(addresses), len(keys))
    if remainder:
        raise ValueError(f"{len(addresses)} segments do not divide into {len(keys)} pages")
    segments = list(zip(addresses, sizes, strict=True))
    for position, key in enumerate(keys):
        yield key, segments[position * per_page : (position + 1) * per_page]


class ReferenceBackend(HiCacheStorage):
    """Stores pages under ``extra_config["directory"]``, one file for each (key, pool, rank)."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        self.config = storage_config
        extra_config = storage_config.extra_config or {}
        self.directory = Path(extra_config["directory"])
        self.directory.mkdir(parents=True, exist_ok=True)
        self.calls: Counter[str] = Counter()
        self.threads: defaultdict[str, set[str]] = defaultdict(set)
        self._count_lock = threading.Lock()

    def path(self, key: str, pool: PoolName = PoolName.KV) -> Path:
        """MLA pages are the same on every TP rank and have one writer; others are per rank."""
        shared = self.config.is_mla_model and pool != PoolName.MAMBA
        rank = "all" if shared else f"{self.config.tp_rank}of{self.config.tp_size}"
        return self.directory / f"{key}.{pool}.{rank}"

    # --- v1: KV pages, straight from and into the host pool ----------------------------------

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        self._count("batch_set_v1")
        return self._write_pages(keys, host_indices, self.mem_pool_host, PoolName.KV)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        self._count("batch_get_v1")
        return self._read_pages(keys, host_indices, self.mem_pool_host, PoolName.KV)

    # --- v2: any registered pool --------------------------------------------------------------

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        self._count("batch_set_v2")
        return {
            transfer.name: self._write_pages(
                transfer.keys or [],
                transfer.host_indices,
                self.registered_pools[transfer.name],
                transfer.name,
            )
            for transfer in transfers
        }

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        self._count("batch_get_v2")
        return {
            transfer.name: self._read_pages(
                transfer.keys or [],
                transfer.host_indices,
                self.registered_pools[transfer.name],
                transfer.name,
            )
            for transfer in transfers
        }

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Every prefix length, in pages, that all pools can restore, and the longest of them."""
        self._count("batch_exists_v2")
        kv_pages = self._leading_pages(keys, PoolName.KV)
        hit_pages: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            lengths = self._restorable_lengths(keys[:kv_pages], transfer)
            if lengths:
                hit_pages[transfer.name] = max(lengths)
            restorable &= lengths
        return PoolTransferResult(max(restorable, default=0), hit_pages, sorted(restorable))

    def _restorable_lengths(self, keys: list[str], transfer: PoolTransfer) -> set[int]:
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, self._leading_pages(keys, transfer.name) + 1))
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            raise ValueError(f"unsupported hit policy {transfer.hit_policy} of {transfer.name}")
        window = max(1, len(transfer.keys or ()))
        present = [self.path(key, transfer.name).exists() for key in keys]
        return {
            length for length in range(1, len(keys) + 1) if all(present[max(0, length - window) : length])
        }

    # --- the older interface: SGLang copies each page into a flat tensor ----------------------

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        if value is None:
            raise ValueError("set() needs the page as a tensor")
        page = value.contiguous().view(torch.uint8).numpy().tobytes()
        self._write_file(self.path(key), [page])
        return True

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any | None = None,
    ) -> torch.Tensor | None:
        if target_location is None:
            raise ValueError("get() needs a tensor to read into")
        target = target_location.view(torch.uint8)
        page = self._read_file(self.path(key), target.numel())
        if page is None:
            return None
        target.copy_(torch.frombuffer(page, dtype=torch.uint8))
        return target_location

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        self._count("batch_set")
        return all(self.set(key, value) for key, value in zip(keys, values or (), strict=True))

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        self._count("batch_get")
        targets = target_locations or ()
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def exists(self, key: str) -> bool:
        return self.path(key).exists()

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        self._count("batch_exists")
        return self._leading_pages(keys, PoolName.KV)

    # --- lifecycle ---------------------------------------------------------------------------

    def on_host_pools_registered(self) -> None:
        self._count("on_host_pools_registered")

    def clear(self) -> None:
        self._count("clear")
        for path in self.directory.iterdir():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._count("close")

    def get_stats(self) -> None:
        return None

    # --- pages and files ---------------------------------------------------------------------

    def _count(self, method: str) -> None:
        # Prefetch query, prefetch reads and backup run on three threads of SGLang's.
        with self._count_lock:
            self.calls[method] += 1
            self.threads[method].add(threading.current_thread().name)

    def _leading_pages(self, keys: Sequence[str], pool: PoolName) -> int:
        for position, key in enumerate(keys):
            if not self.path(key, pool).exists():
                return position
        return len(keys)

    def _write_pages(
        self, keys: Sequence[str], host_indices: torch.Tensor, host_pool: Any, pool: PoolName
    ) -> list[bool]:
        for key, segments in page_segments(keys, host_indices, host_pool):
            pieces = [ctypes.string_at(address, size) for address, size in segments]
            self._write_file(self.path(key, pool), pieces)
        return [True] * len(keys)

    def _read_pages(
        self, keys: Sequence[str], host_indices: torch.Tensor, host_pool: Any, pool: PoolName
    ) -> list[bool]:
        return [
            self._read_page(self.path(key, pool), segments)
            for key, segments in page_segments(keys, host_indices, host_pool)
        ]

    def _read_page(self, path: Path, segments: Sequence[Segment]) -> bool:
        page = self._read_file(path, sum(size for _, size in segments))
        if page is None:
            return False
        start = 0
        for address, size in segments:
            ctypes.memmove(address, bytes(page[start : start + size]), size)
            start += size
        return True

    def _write_file(self, path: Path, pieces: Sequence[bytes]) -> None:
        temporary = path.with_name(f".{uuid.uuid4().hex}")
        temporary.write_bytes(b"".join(pieces))
        os.replace(temporary, path)

    def _read_file(self, path: Path, size_bytes: int) -> bytearray | None:
        """The file's bytes, or None if it is absent or has another size than the page."""
        try:
            page = bytearray(path.read_bytes())
        except FileNotFoundError:
            return None
        return page if len(page) == size_bytes else None

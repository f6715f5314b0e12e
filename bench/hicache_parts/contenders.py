"""The backends that take turns, each called as SGLang 0.5.23's `HiCacheController` calls it.

`gdsstore` and `nixl` by the v1 interface (`_page_set_zero_copy`, `_page_get_zero_copy`), `file` by the flat one
(`_generic_page_set`, `_generic_page_get`), which copies every page.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from hicache_parts import page_cache
from hicache_parts.pool import HostPages

OURS, FILE, NIXL = "gdsstore", "file", "nixl"
MODEL = "bench"


class Contender(Protocol):
    """A storage backend with its host pool. Not thread-safe."""

    name: str

    def save(self, keys: list[str], indices: Any) -> bool:
        """Whether all pages were stored, with their bytes on the drive."""

    def before_load(self, keys: list[str]) -> None:
        """What has to happen, outside of the clock, so that the next load reads from the drive."""

    def load(self, keys: list[str], indices: Any) -> int:
        """How many pages from the start were loaded into the pool."""

    def exists(self, keys: list[str]) -> int:
        """How many pages from the start are stored."""

    def close(self) -> None: ...


Opener = Callable[[Path, HostPages], Contender]


class _V1:
    def __init__(self, name: str, backend: Any, pages: HostPages) -> None:
        self.name, self._backend = name, backend
        backend.register_mem_pool_host(pages.pool)
        backend.on_host_pools_registered()

    def save(self, keys: list[str], indices: Any) -> bool:
        return all(self._backend.batch_set_v1(keys, indices))

    def before_load(self, keys: list[str]) -> None:
        """Nothing: both read with O_DIRECT."""

    def load(self, keys: list[str], indices: Any) -> int:
        return _leading(self._backend.batch_get_v1(keys, indices))

    def exists(self, keys: list[str]) -> int:
        return int(self._backend.batch_exists(keys))

    def close(self) -> None:
        self._backend.close()
        self._backend = None
        gc.collect()  # NIXL's agent has no close of its own


class _File:
    name = FILE

    def __init__(self, directory: Path, pages: HostPages, flush: bool) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        self._directory, self._pool, self._flush = directory, pages.pool, flush
        self._backend: Any = HiCacheFile(_config({}), file_path=str(directory))
        self._backend.register_mem_pool_host(pages.pool)

    def save(self, keys: list[str], indices: Any) -> bool:
        step = self._pool.page_size
        data = [self._pool.get_data_page(indices[at * step]) for at in range(len(keys))]
        stored = bool(self._backend.batch_set(keys, data))
        if self._flush:
            page_cache.write_out(self._paths(keys))
        return stored

    def before_load(self, keys: list[str]) -> None:
        page_cache.drop(self._paths(keys))

    def load(self, keys: list[str], indices: Any) -> int:
        step = self._pool.page_size
        targets = [self._pool.get_dummy_flat_data_page() for _ in keys]
        loaded = self._backend.batch_get(keys, targets)
        for at, data in enumerate(loaded):
            if data is None:
                return at
            self._pool.set_from_flat_data_page(indices[at * step], data)
        return len(keys)

    def exists(self, keys: list[str]) -> int:
        return int(self._backend.batch_exists(keys))

    def close(self) -> None:
        self._backend = None

    def _paths(self, keys: list[str]) -> list[Path]:
        return [self._directory / f"{key}{self._backend.config_suffix}.bin" for key in keys]


def open_ours(directory: Path, pages: HostPages, **settings: Any) -> Contender:
    """`settings`: of gdsstore, as in `--hicache-storage-backend-extra-config`."""
    from sglang_backend.storage import GdsStoreHiCache

    extra = {"path": str(directory), "weights": MODEL, "interface_v1": 1, **settings}
    return _V1(OURS, GdsStoreHiCache(_config(extra), {}), pages)


def open_file(directory: Path, pages: HostPages, *, flush: bool = True) -> Contender:
    """`flush`: a save ends when its bytes are on the drive."""
    return _File(directory, pages, flush)


def open_nixl(directory: Path, pages: HostPages) -> Contender:
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    extra = {
        "plugin": {"posix": {"active": True, "use_uring": "true"}},
        "use_direct_io": True,
        "l3_cleaner_enabled": False,  # it deletes pages where the drive is more than 80 % full
    }
    return _V1(NIXL, HiCacheNixl(_config(extra), file_path=str(directory)), pages)


@contextlib.contextmanager
def opened(opener: Opener, directory: Path, pages: HostPages) -> Iterator[Contender]:
    """The backend for the length of a `with`."""
    contender = opener(directory, pages)
    try:
        yield contender
    finally:
        contender.close()


def _config(extra: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=MODEL,
        extra_config=extra,
    )


def _leading(results: list[bool]) -> int:
    return results.index(False) if False in results else len(results)

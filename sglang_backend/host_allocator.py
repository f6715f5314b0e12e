"""Huge-page, NUMA-bound, pre-faulted memory for HiCache's host pool.

SGLang 0.5.23 chooses a pool's allocator by a fixed list of backend names, and a dynamic backend is not on it. The smallest
supported way in is its plugin entry point (`sglang.srt.plugins`): installing gdsstore makes SGLang call `register` in each of its
processes. It does nothing unless the extra config of this backend says `"host_allocator": true`, or there is none and
SGLANG_GDSSTORE_HOST_ALLOCATOR=1 is set (a backend that is attached at run time comes after the pool was made).

SGLang pins what it gets with cudaHostRegister itself, so the arena does not.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gdsstore import Arena, GdsStoreError
from gdsstore.memory.numa import node_of_path
from gdsstore.memory.syscalls import advise

log = logging.getLogger("gdsstore.sglang")

SWITCH = "host_allocator"
ENVIRONMENT = (
    "SGLANG_GDSSTORE_HOST_ALLOCATOR"  # not GDSSTORE_*: those are settings of the store, and this is none
)
CHOOSER = "sglang.srt.mem_cache.pool_host.common.get_allocator_from_storage"
BACKEND_CLASS = "GdsStoreHiCache"


def register() -> None:
    """SGLang's plugin entry point: put our allocator before the list of SGLang's own."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CHOOSER, choose_allocator, HookType.AROUND)


def choose_allocator(original: Callable[[str], Any], allocator_type: str) -> Any:
    """Ours where it was asked for, else SGLang's choice; also where ours cannot be had, with the reason in the log."""
    extra_config = _extra_config()
    if not is_wanted(extra_config, os.environ):
        return original(allocator_type)
    path = extra_config.get("path")
    first = path[0] if isinstance(path, list) and path else path
    return make_allocator(
        str(first) if first else None, extra_config.get("numa_node"), original, allocator_type
    )


def is_wanted(extra_config: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    if extra_config.get("class_name") == BACKEND_CLASS:
        return extra_config.get(SWITCH, False) is True
    return not extra_config and environment.get(ENVIRONMENT) == "1"


def make_allocator(
    path: str | None, numa_node: int | None, original: Callable[[str], Any], allocator_type: str
) -> Any:
    """A `HostTensorAllocator` on arenas. `path`: the store; with no node given the memory is bound to that of its drive."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

    node = numa_node if numa_node is not None else (node_of_path(Path(path)) if path else None)

    class ArenaAllocator(HostTensorAllocator):  # type: ignore[misc]  # SGLang has no types
        def allocate(self, dims: tuple[int, ...], dtype: Any, device: str) -> Any:
            if device != "cpu":
                raise ValueError(f"a host pool lies in CPU memory, not on {device!r}")
            self.dims, self.dtype = dims, dtype
            nbytes = math.prod(dims) * torch.empty([], dtype=dtype).element_size()
            try:
                arena = Arena(nbytes, numa_node=-1 if node is None else node, pin="off")
            except GdsStoreError as error:
                log.error("no arena for the host pool, SGLang allocates it: %s", error)
                return original(allocator_type).allocate(dims, dtype, device)
            _keep_from_children(arena)
            log.info(
                "host pool: %d bytes in pages of %d, NUMA node %s%s",
                nbytes,
                arena.grant.page_bytes,
                arena.grant.numa_node,
                "".join(f"; {note}" for note in arena.grant.notes),
            )
            # The tensor holds the array, and the array keeps the memory mapped.
            return torch.from_numpy(arena.array[:nbytes]).view(dtype).reshape(dims)

    return ArenaAllocator()


def _keep_from_children(arena: Arena) -> None:
    """A fork would make this memory copy-on-write: the next write would move it away from where the GPU has it pinned."""
    try:
        advise(arena.address, arena.size_bytes, mmap.MADV_DONTFORK)
    except OSError as error:
        log.warning("the host pool is inherited by forked processes: %s", error)


def _extra_config() -> dict[str, Any]:
    """The storage backend's extra config as the server was given it; empty where there is none that can be read here."""
    from sglang.srt.runtime_context import get_memory

    try:
        text = get_memory().hicache_storage_backend_extra_config
        value = json.loads(text) if text and not text.startswith("@") else {}
    except (AttributeError, RuntimeError, ValueError):
        return {}
    if text and text.startswith("@"):
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        value = HybridCacheController.parse_storage_backend_extra_config(text)[0]
    return value if isinstance(value, dict) else {}

"""A real SGLang host pool (MHA, page_first) of a given number of pages, filled with bytes that follow from the pages' keys."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.replay.truth import count_wrong, fill_pages

PAGE_TOKENS = 64
# Bytes a token of one layer with 8 heads of 128 bfloat16, K and V: 256 KiB a page of one layer, 4 MiB of 16.
LAYER_HEADS, HEAD_DIM = 8, 128
SMALLEST_HEAD_DIM = 32  # one head, one layer: pages of 8 KiB whose K and V are 4 KiB each

U8 = npt.NDArray[np.uint8]


class PageMemory(Protocol):
    """Where the pages of a batch lie while they are moved."""

    count: int
    page_bytes: int

    def fill(self, keys: U8, place: npt.NDArray[np.intp]) -> None:
        """Write what the pages of uint8[count, 32] keys must hold; key i's page is number `place[i]`."""

    def blank(self) -> None:
        """Overwrite all pages, so that one that is not loaded is seen."""

    def wrong(self, keys: U8, place: npt.NDArray[np.intp]) -> int:
        """How many pages do not hold what they must."""


class HostPages:
    """SGLang's `MHATokenToKVPoolHost` with exactly `count` pages. Raises ArgumentError for a page size it cannot have."""

    def __init__(self, page_bytes: int, count: int) -> None:
        import torch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        layers, heads, dim = _shape(page_bytes)
        self.device = MHATokenToKVPool(  # its buffers tell the host pool its shape; one page is enough
            size=PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            head_num=heads,
            head_dim=dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )
        self.pool: Any = MHATokenToKVPoolHost(
            self.device.get_device_pool_infos()[0].buffer_info,
            1.0,
            0,
            PAGE_TOKENS,
            "page_first",
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=PAGE_TOKENS,
            start_layer=0,
            end_layer=layers,
            host_token_capacity=count * PAGE_TOKENS,
        )
        self.count, self.page_bytes = count, page_bytes
        flat = self.pool.kv_buffer.view(torch.uint8).numpy()
        self._parts: U8 = flat.reshape(2, count, page_bytes // 2)  # K of all pages, then V
        # As the ceiling sees it: any memory of the same kind.
        self.address, self.size_bytes, self.array = flat.ctypes.data, flat.size, flat.reshape(-1)

    def indices(self, place: npt.NDArray[np.intp]) -> Any:
        """SGLang's host indices of the pages `place`: int64[len(place) * PAGE_TOKENS]."""
        import torch

        first = np.asarray(place, np.int64)[:, None] * PAGE_TOKENS
        return torch.from_numpy((first + np.arange(PAGE_TOKENS)).reshape(-1))

    def huge_share(self) -> float:
        """Share of the pool's memory that lies in huge pages, as `/proc/self/smaps` tells."""
        return huge_share(self._parts.ctypes.data)

    def fill(self, keys: U8, place: npt.NDArray[np.intp]) -> None:
        for part, own in zip(self._parts, _part_keys(keys, place), strict=True):
            fill_pages(own, part)

    def blank(self) -> None:
        self._parts[:] = 0

    def wrong(self, keys: U8, place: npt.NDArray[np.intp]) -> int:
        parts = zip(self._parts, _part_keys(keys, place), strict=True)
        return len(np.unique(np.concatenate([count_wrong(own, part) for part, own in parts])))


def use_host_allocator() -> None:
    """Pools made from now on lie in gdsstore's memory, as with `"host_allocator": true` in the backend's config."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_backend import host_allocator

    os.environ[host_allocator.ENVIRONMENT] = "1"
    host_allocator.register()
    HookRegistry.apply_hooks()


def huge_share(address: int) -> float:
    """Share of the mapping at `address` that lies in huge pages."""
    facts: dict[str, int] = {}
    inside = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name, value = line.split()[:2]
            if not name.endswith(":"):
                low, high = (int(end, 16) for end in name.split("-"))
                inside = low <= address < high
            elif inside and value.isdigit():
                facts[name[:-1]] = int(value)  # KiB
    if facts.get("KernelPageSize", 4) > 4:
        return 1.0  # hugetlb
    huge = sum(facts.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"))
    return round(huge / max(1, facts.get("Rss", 0)), 2)


def _part_keys(keys: U8, place: npt.NDArray[np.intp]) -> tuple[U8, U8]:
    """Keys in the order of the pages, and others for V, so that K and V of a page differ."""
    ordered = np.empty_like(keys)
    ordered[place] = keys
    return ordered, ~ordered


def _shape(page_bytes: int) -> tuple[int, int, int]:
    """Layers, heads and head dim of pages of that size."""
    one_layer = PAGE_TOKENS * LAYER_HEADS * HEAD_DIM * 2 * 2
    smallest = PAGE_TOKENS * SMALLEST_HEAD_DIM * 2 * 2
    if page_bytes % one_layer == 0:
        return page_bytes // one_layer, LAYER_HEADS, HEAD_DIM
    if page_bytes % smallest == 0:
        return 1, page_bytes // smallest, SMALLEST_HEAD_DIM
    raise ArgumentError(f"pages of this bench are multiples of {smallest} bytes", page_bytes=page_bytes)

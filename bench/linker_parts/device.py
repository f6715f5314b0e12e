"""SGLang's own MHA device pool on the CPU with the linker behind it, and pages whose bytes follow from their keys."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.errors import DeadlineError, GdsStoreError
from gdsstore.replay.truth import count_wrong, fill_pages
from gdsstore.sizes import GiB
from linker_parts.sizes import HEAD_DIM, HEADS, LAYERS, NODE_PAGES, PAGE_BYTES, PAGE_TOKENS, SEGMENT_BYTES

U8 = npt.NDArray[np.uint8]
SAVE_S = 300.0


class Device:
    """A pool of `pages` pages. Its linker is called as SGLang's scheduler calls it, from one thread."""

    def __init__(self, pool: Any, linker: Any, pages: int) -> None:
        import torch

        self.linker, self._pages = linker, pages
        # Of each buffer the pages as rows. SGLang's page 0 takes what nobody wants to keep.
        self._rows: list[U8] = [
            buffer.view(torch.uint8).numpy().reshape(pages + 1, -1)[1:]
            for layer in range(LAYERS)
            for buffer in (pool.k_buffer[layer], pool.v_buffer[layer])
        ]

    @property
    def piece_bytes(self) -> int:
        return int(self._rows[0].shape[1])

    def pieces(self, place: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        """Addresses of the pieces of the pages at `place`, in the order of their records. Shape (pages x buffers,)."""
        base = np.array([rows.ctypes.data for rows in self._rows], np.uint64)
        offset = np.asarray(place, np.uint64)[:, None] * np.uint64(self.piece_bytes)
        return np.asarray((base + offset).reshape(-1), np.uint64)

    def transfer(self, names: list[str], place: npt.NDArray[np.intp] | None = None) -> list[Any]:
        """SGLang's description of pages, by their keys, and of where they lie."""
        import torch
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        if place is None:
            return [PoolTransfer(name=PoolName.KV, keys=names)]
        first = (np.asarray(place, np.int64)[:, None] + 1) * PAGE_TOKENS
        indices = torch.from_numpy((first + np.arange(PAGE_TOKENS)).reshape(-1))
        return [PoolTransfer(name=PoolName.KV, keys=names, device_indices=indices)]

    def store(self, keys: U8) -> None:
        """Save the pages of the keys. Raises GdsStoreError where one is not stored, DeadlineError where that takes too long."""
        for number, rows in enumerate(self._rows):
            fill_pages(_keys_of(keys, number), rows[: len(keys)])
        names = [key.tobytes().hex() for key in keys]
        deadline = time.monotonic() + SAVE_S
        for first in range(0, len(keys), NODE_PAGES):
            place = np.arange(first, min(first + NODE_PAGES, len(keys)))
            if not self.linker.offload(self.transfer(names[first : first + NODE_PAGES], place)):
                raise GdsStoreError("the linker did not take all pages")
            while not self.linker.num_completed_offloads():
                if time.monotonic() > deadline:
                    raise DeadlineError("the pages were not stored in time")
                time.sleep(0.001)
            if not self.linker.pop_completed_offload():
                raise GdsStoreError("the linker could not save all pages")

    def blank(self) -> None:
        for rows in self._rows:
            rows[:] = 0

    def wrong(self, keys: U8, place: npt.NDArray[np.intp]) -> int:
        """How many pages do not hold what they must; key i's page is number `place[i]`."""
        found = [count_wrong(_keys_of(keys, number), rows[place]) for number, rows in enumerate(self._rows)]
        return len(np.unique(np.concatenate(found)))


@contextmanager
def device(folder: Path, pages: int) -> Iterator[Device]:
    """In the environment of hicache_parts.environment.prepare_sglang. The store is made in `folder`."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

    config = {
        "linker": "GdsStoreLinker",
        "linker_module_path": "sglang_backend.linker",
        "linker_extra_config": {
            "path": str(folder),
            "weights": "bench",
            "capacity": _capacity(pages),
            "segment_bytes": SEGMENT_BYTES,
        },
    }
    fixtures = importlib.import_module("cpu_fixtures")  # of tests/sglang_cpu, as prepare_sglang finds it
    with fixtures.single_rank_context() as server_args:
        pool = MHATokenToKVPool(
            size=pages * PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(
                pool.size, PAGE_TOKENS, torch.bfloat16, "cpu", pool, need_sort=False
            ),
            page_size=PAGE_TOKENS,
        )
        linker = create_unified_cache_linker(
            server_args,
            params,
            backend="dynamic",
            config=config,
            components={ComponentType.FULL},
            forward_stream=None,
        )
        try:
            yield Device(pool, linker, pages)
        finally:
            linker.close()


def _capacity(pages: int) -> int:
    return pages * PAGE_BYTES * 5 // 4 + GiB


def _keys_of(keys: U8, number: int) -> U8:
    """Other bytes for each buffer."""
    own = keys.copy()
    own[:, -1] ^= number
    return own

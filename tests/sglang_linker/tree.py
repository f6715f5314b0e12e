"""The scheduler's steps on SGLang's radix tree with this linker behind it."""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cpu_fixtures import (
    LAYERS,
    MHA,
    PAGE_SIZE,
    LinkedCache,
    device_buffers,
    device_pool,
    linked_cache,
    linker_request,
    page_allocator,
    single_rank_context,
)
from kits import wait_for_offloads
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.sglang_linker.linkers import linker_config
from tests.sglang_server.stored import page_keys

PAGES = 12
TOKENS = PAGES * PAGE_SIZE
OFFLOAD_TIMEOUT_S = 60.0


class Tree:
    """A sequence is named by its first token."""

    def __init__(self, linked: LinkedCache) -> None:
        self.cache, self.linker = linked.cache, linked.linker
        self.device, self.allocator = linked.device, linked.allocator

    def kv(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """What the rows hold, in every layer."""
        return [buffer[rows].clone() for buffer in device_buffers(self.device)]

    def compute(self, first: int, tokens: int = TOKENS) -> list[torch.Tensor]:
        """Stand-in for a prefill: new rows of random bytes, inserted and stored. Returns what they hold."""
        rows = self.allocator.alloc(tokens)
        for buffer in device_buffers(self.device):
            buffer[rows] = torch.randn(buffer[rows].shape).to(buffer.dtype)
        self.insert(first, rows)
        return self.kv(rows)

    def insert(
        self, first: int, rows: torch.Tensor, *, wait: bool = True, session: str | None = None
    ) -> None:
        self.cache.insert(
            InsertParams(key=key_of(first, len(rows)), value=rows.to(torch.int64), session_id=session)
        )
        if wait:
            wait_for_offloads(self.cache, OFFLOAD_TIMEOUT_S)

    def stored_tokens(self, first: int, tokens: int = TOKENS, request: Any = None) -> int:
        """How many tokens of a sequence the linker would load."""
        match = self.cache.match_prefix(
            MatchPrefixParams(key=key_of(first, tokens), req=request or linker_request())
        )
        return int(match.host_hit_length)

    def on_device(self, first: int, tokens: int = TOKENS) -> int:
        match = self.cache.match_prefix(MatchPrefixParams(key=key_of(first, tokens)))
        return int(match.device_prefix_len)

    def evict(self) -> None:
        """Everything leaves the device; what its rows held is gone."""
        self.evict_tree()
        self._wipe()

    def evict_tree(self) -> None:
        self.cache.evict(EvictParams(num_tokens=self.device.size))

    def flush(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self._wipe()

    def _wipe(self) -> None:
        for buffer in device_buffers(self.device):
            buffer.zero_()

    def queue(
        self, first: int, tokens: int = TOKENS, request: Any = None
    ) -> tuple[SimpleNamespace, torch.Tensor]:
        """Match and admit a request. Returns it, and the rows its pages will go to."""
        request = request or linker_request()
        match = self.cache.match_prefix(MatchPrefixParams(key=key_of(first, tokens), req=request))
        request.last_node = match.last_device_node
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
            )
        )
        return request, self.cache.linker.private_load_indices[request.rid].clone()

    def run_batch(self, *requests: SimpleNamespace) -> list[Any]:
        """Start what is queued, wait layer by layer as a forward does. Returns the requests that failed."""
        index = self.cache.ready_to_load_host_cache()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        failed: list[Any] = self.cache.finish_external_linker_loads(list(requests))
        return failed

    def load(self, first: int, tokens: int = TOKENS, request: Any = None) -> list[torch.Tensor]:
        """Load a sequence, which must succeed. Returns what came."""
        request, rows = self.queue(first, tokens, request)
        assert self.run_batch(request) == []
        return self.kv(rows)


@contextmanager
def drafted_tree(folder: Path, *, packed: Sequence[Any] = (), sidecar: Sequence[Any] = ()) -> Iterator[Tree]:
    """As `tree_of`, of an MHA model with a draft model's pools as SGLang names them: with MTP, or EAGLE."""
    settings: dict[str, Any] = {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
    }
    with single_rank_context(**settings) as server_args:
        pool = device_pool(MHA)
        allocator = page_allocator(pool)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=4, max_context_len=1024, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE_SIZE,
            tree_components=(ComponentType.FULL,),
            mtp_draft_device_pools=tuple(packed),
            sidecar_draft_device_pools=tuple(sidecar),
        )
        cache = UnifiedRadixCache(params)
        linker = create_unified_cache_linker(
            server_args,
            params,
            backend="dynamic",
            config=linker_config(folder),
            components=set(cache.components),
            forward_stream=None,
        )
        cache.init_cache_linker(linker)
        pool.register_layer_transfer_counter(cache.linker.layer_done_counter)
        try:
            yield Tree(LinkedCache(cache, linker, pool, allocator))
        finally:
            cache.release_host_resources()


@contextmanager
def tree_of(kind: str, core: str, folder: Path, **settings: Any) -> Iterator[Tree]:
    with linked_cache(kind, core, linker_config(folder, **settings)) as linked:
        yield Tree(linked)


def key_of(first: int, tokens: int = TOKENS) -> RadixKey:
    return RadixKey(array.array("q", range(first, first + tokens)), None)


def keys_of(first: int, tokens: int = TOKENS) -> list[str]:
    """SGLang's keys of a sequence's pages."""
    return page_keys([*range(first, first + tokens), 0])


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))

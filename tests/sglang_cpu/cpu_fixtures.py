"""Builds SGLang's own pools, controllers and trees on CPU, in sizes that suit a unit test."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_only_stack
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel

PAGE_SIZE = 16
LAYERS = 3
HEADS, HEAD_DIM = 2, 16
LATENT_RANK, ROPE_DIM = 24, 8
DEVICE_TOKENS = 512
HOST_TO_DEVICE_RATIO = 2.0
DTYPE = torch.bfloat16

MODEL_NAME = "example/tiny"

MHA, MLA = "mha", "mla"

_rids = itertools.count()


@contextmanager
def single_rank_context(**server_args: Any) -> Iterator[Any]:
    """SGLang's process-wide settings for one CPU rank; yields the server arguments."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    attention_ranks = {"attn_tp_rank": 0, "attn_cp_rank": 0, "attn_dp_rank": 0, "attn_dcp_rank": 0}
    with (
        get_context().override_server_args(device="cpu", page_size=PAGE_SIZE, **server_args) as arguments,
        get_parallel().override(**ranks, **attention_ranks),
    ):
        yield arguments


def storage_config(**extra_config: Any) -> HiCacheStorageConfig:
    """The configuration a backend of one MHA rank receives."""
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=MODEL_NAME,
        extra_config=extra_config,
    )


def device_pool(kind: str, tokens: int = DEVICE_TOKENS) -> MHATokenToKVPool | MLATokenToKVPool:
    """A device pool on CPU, filled with random values. ``kind`` is MHA or MLA."""
    common: dict[str, Any] = {
        "size": tokens,
        "page_size": PAGE_SIZE,
        "dtype": DTYPE,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == MHA:
        pool = MHATokenToKVPool(head_num=HEADS, head_dim=HEAD_DIM, **common)
    else:
        pool = MLATokenToKVPool(kv_lora_rank=LATENT_RANK, qk_rope_head_dim=ROPE_DIM, **common)
    for buffer in device_buffers(pool):
        buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
    return pool


def device_buffers(pool: MHATokenToKVPool | MLATokenToKVPool) -> list[torch.Tensor]:
    """All buffers of a device pool, each [row, ...]: K then V layers for MHA, layers for MLA."""
    if isinstance(pool, MHATokenToKVPool):
        return [*pool.k_buffer, *pool.v_buffer]
    return list(pool.kv_buffer)


def host_pool(
    pool: MHATokenToKVPool | MLATokenToKVPool, layout: str, *, pin_memory: bool = False
) -> MHATokenToKVPoolHost | MLATokenToKVPoolHost:
    """The host pool SGLang builds for ``pool`` with ``--hicache-mem-layout layout``."""
    buffer_info = pool.get_device_pool_infos()[0].buffer_info
    host_size_gb = 0
    arguments = (buffer_info, HOST_TO_DEVICE_RATIO, host_size_gb, PAGE_SIZE, layout)
    options: dict[str, Any] = {
        "pin_memory": pin_memory,
        "device": "cpu",
        "device_capacity_tokens": pool.size,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    if isinstance(pool, MHATokenToKVPool):
        return MHATokenToKVPoolHost(*arguments, **options)
    return MLATokenToKVPoolHost(*arguments, target_layer_num=LAYERS, **options)


def page_allocator(pool: MHATokenToKVPool | MLATokenToKVPool) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pool.size, PAGE_SIZE, DTYPE, "cpu", pool, need_sort=False)


@dataclass(frozen=True)
class ControllerStack:
    """A storage controller with the pools it moves pages between."""

    controller: Any
    device: MHATokenToKVPool | MLATokenToKVPool
    host: MHATokenToKVPoolHost | MLATokenToKVPoolHost
    allocator: PagedTokenToKVPoolAllocator


@contextmanager
def controller_stack(
    kind: str,
    layout: str,
    io_backend: str,
    storage_backend: str,
    extra_config: Mapping[str, Any],
    *,
    hybrid: bool,
    device_tokens: int = DEVICE_TOKENS,
) -> Iterator[ControllerStack]:
    """``HybridCacheController`` (what the server uses) or its base ``HiCacheController``.

    The storage backend is attached, and detached at the end.
    """
    settings: dict[str, Any] = {
        "hicache_mem_layout": layout,
        "hicache_io_backend": io_backend,
        "hicache_write_policy": "write_through",
        "hicache_ratio": HOST_TO_DEVICE_RATIO,
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": storage_backend,
    }
    with single_rank_context(**settings):
        pool = device_pool(kind, device_tokens)
        allocator = page_allocator(pool)
        if hybrid:
            group, controller = build_kv_only_stack(
                params=CacheInitParams(
                    disable=False,
                    req_to_token_pool=None,
                    token_to_kv_pool_allocator=allocator,
                    page_size=PAGE_SIZE,
                ),
                kv_pool=pool,
                full_layer_mapping={layer: layer for layer in range(LAYERS)},
                load_cache_event=Event(),
                storage_backend=storage_backend,
                use_mla=kind == MLA,
                model_name=MODEL_NAME,
                storage_backend_extra_config=dict(extra_config),
            )
            host = group.anchor_entry.host_pool
        else:
            host = host_pool(pool, layout)
            controller = HiCacheController(
                allocator,
                host,
                PAGE_SIZE,
                None,
                Event(),
                write_policy="write_through",
                io_backend=io_backend,
                storage_backend=storage_backend,
                model_name=MODEL_NAME,
                storage_backend_extra_config=dict(extra_config),
            )
        try:
            yield ControllerStack(controller, pool, host, allocator)
        finally:
            controller.detach_storage_backend()


@dataclass(frozen=True)
class LinkedCache:
    """SGLang's radix tree over a device pool, with a linker attached."""

    cache: UnifiedRadixCache
    linker: Any
    device: MHATokenToKVPool | MLATokenToKVPool
    allocator: PagedTokenToKVPoolAllocator


@contextmanager
def linked_cache(kind: str, tree_core: str, linker_config: Mapping[str, Any]) -> Iterator[LinkedCache]:
    """``linker_config`` is the value of ``--unified-cache-external-linker-config``.

    ``tree_core`` is "rust" (what the server uses) or "python".
    """
    settings: dict[str, Any] = {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
    }
    with single_rank_context(**settings) as server_args:
        pool = device_pool(kind)
        allocator = page_allocator(pool)
        requests = ReqToTokenPool(size=4, max_context_len=1024, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE_SIZE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=tree_core,
        )
        cache = UnifiedRadixCache(params)
        linker = create_unified_cache_linker(
            server_args,
            params,
            backend="dynamic",
            config=dict(linker_config),
            components=set(cache.components),
            forward_stream=None,
        )
        cache.init_cache_linker(linker)
        pool.register_layer_transfer_counter(cache.linker.layer_done_counter)
        try:
            yield LinkedCache(cache, linker, pool, allocator)
        finally:
            cache.release_host_resources()


def linker_request() -> SimpleNamespace:
    """The fields of a scheduler request that the linker path reads and writes."""
    return SimpleNamespace(
        rid=f"request-{next(_rids)}",
        session=None,
        session_id=None,
        priority=0,
        kv=None,
        swa_branching_seqlen=None,
        mamba_pool_idx=None,
        last_node=None,
        skip_radix_cache_insert=False,
        discard_output_reason=None,
    )

"""KV of 4 and 8 bits with block scales beside it: SGLang's own pools, and what a page of them holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    FP4MXBlock16KVCacheMethod,
    NVFP4KVCacheMethod,
)
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from gdsstore import ArgumentError, Config, ConfigError, Parallelism, Store
from sglang_backend.device_pools_resolve import DevicePools, resolve
from sglang_backend.identity import Model
from sglang_backend.linker_identity import Rank
from sglang_backend.linker_pools import StoredPool, bind
from tests.sglang_linker.linkers import SETTINGS

LAYERS, HEADS, DIM, PAGES = 3, 2, 64, 6
TIMEOUT_S = 60.0
CONFIG = Config.load(**{name: value for name, value in SETTINGS.items() if name != "weights"})


def mha(page_tokens: int, cls: type = MHATokenToKVPool, **more: Any) -> Any:
    return cls(
        size=PAGES * page_tokens,
        page_size=page_tokens,
        dtype=torch.float8_e4m3fn,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        **more,
    )


def nvfp4(page_tokens: int) -> Any:
    """As on SM100: scales by tokens, which prefill reads, and those of TRT-LLM's kernels, by pages."""
    method = NVFP4KVCacheMethod(LAYERS, "cpu", page_tokens, native_scale_layout=True)
    method.needs_linear_scale_buffer = lambda: True
    method.needs_native_fp4_scales = lambda: True
    return mha(page_tokens, quant_method=method)


def mla_fp4(page_tokens: int) -> Any:
    return MLATokenToKVPoolFP4(
        PAGES * page_tokens,
        page_size=page_tokens,
        dtype=torch.float8_e4m3fn,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


KINDS = {
    "fp4 in blocks": (lambda: mha(16, quant_method=FP4MXBlock16KVCacheMethod()), 4),
    "nvfp4": (lambda: nvfp4(16), 6),
    "mxfp8 by tokens": (lambda: mha(16, MHATokenToKVPoolMXFP8), 4),
    "mxfp8 interleaved": (lambda: mha(128, MHATokenToKVPoolMXFP8), 4),
    "mla fp4": (lambda: mla_fp4(16), 2),
}


def resolved(pool: Any, page_tokens: int | None = None) -> DevicePools:
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        page_size=page_tokens or pool.page_size,
        mtp_draft_device_pools=(),
        sidecar_draft_device_pools=(),
        mtp_draft_mamba_pools=(),
        req_to_token_pool=None,
    )
    return resolve(params, {ComponentType.FULL})


def tensors(pool: Any) -> list[torch.Tensor]:
    """All that is KV or scales, found by name and not by what the linker knows."""
    found = [
        tensor
        for name, value in vars(pool).items()
        if name.endswith("_buffer") and isinstance(value, list)
        for tensor in value
    ]
    return [tensor.view(torch.uint8) for tensor in found]


def bound(pools: DevicePools, store: Store) -> StoredPool:
    (stored,) = bind(store, Model("m", "w", ()), Rank(Parallelism(), True), pools)
    return stored


def indices(pages: list[int], page_tokens: int) -> Any:
    return (np.array(pages)[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_kv_and_scales_come_back_together_and_nothing_else_is_touched(kind: str, tmp_path: Path) -> None:
    make, parts = KINDS[kind]
    pool = make()
    everything = tensors(pool)
    assert len(everything) == parts * LAYERS, "the pool holds what this test does not know"
    for tensor in everything:
        tensor.random_(256)
    before = [tensor.clone() for tensor in everything]
    pools = resolved(pool)
    page_bytes = sum(tensor.nbytes for tensor in everything) // (PAGES + 1)
    assert [each.layout.page_bytes for each in pools.pools] == [page_bytes]
    keys = np.random.default_rng(1).integers(0, 256, (2, 32), np.uint8)
    with Store(tmp_path, CONFIG) as store:
        stored = bound(pools, store)
        saved = stored.bound.save(keys, stored.pool.pages(indices([2, 5], pool.page_size)))
        assert saved.result(TIMEOUT_S).ok.all()
        for tensor in everything:
            tensor.zero_()
        told: list[int] = []
        loaded = stored.bound.load_layers(
            keys,
            stored.pool.pages(indices([1, 4], pool.page_size)),
            lambda first, last, ok: told.extend(range(first, last)),
        )
        assert loaded.result(TIMEOUT_S).ok.all()
    assert told == list(range(LAYERS))
    for tensor, old in zip(everything, before, strict=True):
        now, was = (each.reshape(PAGES + 1, -1) for each in (tensor, old))
        assert torch.equal(now[[1, 4]], was[[2, 5]])
        assert not now[[0, 2, 3, 5, 6]].any()


def test_pools_with_other_scales_share_no_pages(tmp_path: Path) -> None:
    namespaces = set()
    with Store(tmp_path, CONFIG) as store:
        for make, _ in KINDS.values():
            namespaces.add(bound(resolved(make()), store).bound.digest)
    assert len(namespaces) == len(KINDS)


def test_scales_by_pages_are_only_taken_by_whole_pages() -> None:
    (found,) = resolved(mha(128, MHATokenToKVPoolMXFP8)).pools
    with pytest.raises(ArgumentError, match="whole page"):
        found.pages(np.arange(64, 192))


class Derived(MHATokenToKVPoolMXFP8):
    pass


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (lambda: mha(16, Derived), "Derived.*MXFP8"),
        (
            lambda: _with(mla_fp4(16), kv_scale_buffer=mla_fp4(16).kv_scale_buffer[:2]),
            "scales for each layer",
        ),
        (
            lambda: _with(mla_fp4(16), kv_scale_buffer=[b[:20] for b in mla_fp4(16).kv_scale_buffer]),
            "20 rows|20, ",
        ),
        (lambda: _with(mla_fp4(16), kv_buffer=[b[:, :, ::2] for b in mla_fp4(16).kv_buffer]), "gaps"),
        (lambda: _with(nvfp4(16), kv_cache_layout="hnd"), "hnd"),
        (lambda: _with(nvfp4(16), page_size=32), "pages of 32"),
    ],
)
def test_a_pool_with_scales_that_is_not_known_is_refused(pool: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(pool(), 16)


def _with(pool: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool

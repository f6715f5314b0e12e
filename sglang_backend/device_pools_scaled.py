"""Attention pools of every known class, among them those that keep scales beside their KV: a page holds both, or restores noise.

Scales that are one number a layer (`k_scale`, `v_scale` of fp8 checkpoints, the global ones of NVFP4) come with the weights, and
are no part of a page. These lie beside each token, or each page of tokens, and were computed with its KV.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gdsstore import PageLayout
from sglang_backend import device_pools_kinds as kinds
from sglang_backend.device_pools import Buffers, DevicePool

# Of each class what a layer of a page holds, in this order. What a pool does not have is None there.
PARTS = {
    "MHATokenToKVPool": (  # NVFP4, and FP4 in blocks of 16
        *("k_buffer", "k_scale_buffer", "native_k_scale_buffer"),
        *("v_buffer", "v_scale_buffer", "native_v_scale_buffer"),
    ),
    "MHATokenToKVPoolMXFP8": ("k_buffer", "k_scale_buffer", "v_buffer", "v_scale_buffer"),
    "MLATokenToKVPoolFP4": ("kv_buffer", "kv_scale_buffer"),
}
SCALES = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")


def attention(
    name: str, source: str, pool: Any, needed_at: Mapping[int, int], page_tokens: int
) -> DevicePool:
    """A pool of attention's KV, as its class tells. Raises ConfigError for one that is not known."""
    if any(getattr(pool, scales, None) is not None for scales in SCALES):
        return scaled(name, source, pool, needed_at, page_tokens)
    kind = kinds.mla if type(pool).__name__ == "MLATokenToKVPool" else kinds.mha
    return kind(name, source, pool, needed_at, page_tokens)


def scaled(name: str, source: str, pool: Any, needed_at: Mapping[int, int], page_tokens: int) -> DevicePool:
    """KV of 4 or 8 bits with its block scales: by layers, each with the KV and the scales of its tokens."""
    kind = type(pool).__name__
    kinds.plain(pool, kind if kind in PARTS else " or ".join(PARTS))
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise kinds.refused(pool, f"its KV cache layout is {pool.kv_cache_layout!r}, and only 'nhd' is known")
    parts = [part for part in PARTS[kind] if getattr(pool, part, None) is not None]
    lists = [getattr(pool, part) for part in parts]
    layers = kinds.layers_of(pool, len(lists[0]), needed_at)
    if any(len(each) != layers for each in lists):
        raise kinds.refused(pool, "it does not have scales for each layer")
    order = [buffer for layer in zip(*lists, strict=True) for buffer in layer]
    buffers, page_rows = _rows(pool, order, page_tokens)
    layer_bytes = int(buffers.row_bytes[: len(parts)].sum()) * page_rows
    if int(buffers.row_bytes.sum()) * page_rows != layers * layer_bytes:
        raise kinds.refused(pool, "its layers are not alike")
    method = getattr(getattr(pool, "quant_method", None), "name", "")
    return DevicePool(
        name=name,
        source=source,
        kind=kind,
        buffers=buffers,
        page_tokens=page_tokens,
        page_rows=page_rows,
        # A layer is one run of bytes: what is KV in it, and what scales, the facts tell.
        layout=PageLayout.mla(
            layers=layers, latent_dim=layer_bytes // page_tokens, page_tokens=page_tokens, dtype="uint8"
        ),
        needed_at=tuple(needed_at[layer] for layer in range(layers)),
        replicated=kind.startswith("MLA"),
        facts=(
            ("layers", kinds.join(needed_at[layer] for layer in range(layers))),
            ("dtype", str(pool.dtype)),
            ("quantized", method),
            (
                "parts",
                ";".join(
                    f"{part}:{tuple(at[0].shape[1:])}:{at[0].dtype}" for part, at in _named(parts, lists)
                ),
            ),
        ),
    )


def _named(parts: Sequence[str], lists: Sequence[Any]) -> list[tuple[str, Any]]:
    return list(zip(parts, lists, strict=True))


def _rows(pool: Any, order: Sequence[Any], page_tokens: int) -> tuple[Buffers, int]:
    """The buffers, and how many rows of each a page is: its tokens, or 1 where some scales can only be taken by whole pages."""
    for buffer in order:
        if buffer.dim() < 2 or not buffer.is_contiguous():
            raise kinds.refused(pool, f"a buffer of shape {tuple(buffer.shape)} has gaps in memory")
    buffers = kinds.buffers_of(pool, order)
    counts = np.array([int(buffer.shape[0]) for buffer in order])
    tokens = int(counts[0])
    by_token, by_page = counts == tokens, counts * page_tokens == tokens
    if by_token.all():
        return buffers, page_tokens
    if not (by_token | by_page).all() or int(pool.page_size) != page_tokens:
        raise kinds.refused(
            pool,
            f"it has pages of {pool.page_size} tokens, and buffers of {', '.join(map(str, np.unique(counts)))} rows; "
            f"known are rows of a token, and of a page of {page_tokens}",
        )
    times = np.where(by_page, 1, page_tokens)
    return (
        dataclasses.replace(
            buffers,
            stride=buffers.stride * times,
            row_bytes=buffers.row_bytes * times,
            rows=tokens // page_tokens,
        ),
        1,
    )

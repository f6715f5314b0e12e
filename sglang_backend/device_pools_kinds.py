"""The kinds of device pools. Each function checks one kind and describes it, or refuses it with what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gdsstore import ConfigError, PageLayout
from sglang_backend.device_pools import Buffers, DevicePool

KV, SWA, MAMBA = "kv", "swa", "mamba"
INSTEAD = (
    "Run this model with HiCache (sglang_backend.storage), or without --enable-unified-cache-external-linker"
)
TAG = "sglang-device"


def mha(name: str, source: str, pool: Any, needed_at: Mapping[int, int], page_tokens: int) -> DevicePool:
    """Plain `MHATokenToKVPool`: a K and a V buffer a layer, [tokens, heads, dim]. `needed_at`: forward layer of each pool layer."""
    plain(pool, "MHATokenToKVPool")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise refused(pool, f"its KV cache layout is {pool.kv_cache_layout!r}, and only 'nhd' is known")
    layers = layers_of(pool, len(pool.k_buffer), needed_at)
    heads, key_dim, value_dim = int(pool.head_num), int(pool.head_dim), int(pool.v_head_dim)
    for buffers, dim in ((pool.k_buffer, key_dim), (pool.v_buffer, value_dim)):
        for buffer in buffers:
            _check(pool, buffer, (heads, dim))
    layout = PageLayout.mha(
        layers=layers,
        kv_heads=heads,
        head_dim=key_dim,
        value_head_dim=value_dim,
        page_tokens=page_tokens,
        dtype=_dtype(pool),
    )
    order = [buffer for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for buffer in pair]
    return _tokens(name, source, pool, order, layout, needed_at, page_tokens, replicated=False)


def mla(name: str, source: str, pool: Any, needed_at: Mapping[int, int], page_tokens: int) -> DevicePool:
    """Plain `MLATokenToKVPool`: one buffer a layer, [tokens, 1, latent]."""
    plain(pool, "MLATokenToKVPool")
    layers = layers_of(pool, len(pool.kv_buffer), needed_at)
    latent = int(pool.kv_cache_dim)
    for buffer in pool.kv_buffer:
        _check(pool, buffer, (1, latent))
    layout = PageLayout.mla(layers=layers, latent_dim=latent, page_tokens=page_tokens, dtype=_dtype(pool))
    return _tokens(name, source, pool, pool.kv_buffer, layout, needed_at, page_tokens, replicated=True)


def mamba(requests: Any, first_layer: int) -> DevicePool:
    """The states of `HybridReqToTokenPool`: a row is a state slot, in one temporal and some conv buffers a layer."""
    from sglang.srt.runtime_context import get_memory

    pool = requests.mamba_pool
    plain(pool, "MambaPool")
    if getattr(get_memory(), "enable_unified_memory", False):
        raise refused(pool, "--enable-unified-memory moves its slots about")
    if (
        requests.mamba_ckpt_pool is not None
        or requests.short_conv_pool.enabled
        or requests.ngram_pool.enabled
        or pool._slot_siblings
    ):
        raise refused(pool, "int8 checkpoints and states beside the Mamba state are not restored with it")
    states = [state for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if state.numel()]
    order = [state[layer] for layer in range(pool.num_mamba_layers) for state in states]
    for buffer in order:
        if buffer.dim() < 2 or not dense(buffer[0]):
            raise refused(pool, f"a state of shape {tuple(buffer.shape)} has gaps in memory")
    row_bytes = sum(bytes_of_row(buffer) for buffer in order)
    layer_ids = sorted(requests.mamba_map, key=requests.mamba_map.__getitem__)
    # Equal bytes in another order of axes are another state.
    form = [f"{tuple(s.shape[2:])}:{s.stride()[2:]}:{s.dtype}" for s in states]
    return DevicePool(
        name=MAMBA,
        source=MAMBA,
        kind=type(pool).__name__,
        buffers=buffers_of(pool, order),
        page_tokens=1,
        page_rows=1,
        layout=PageLayout.opaque(row_bytes, page_tokens=1, tag=TAG),
        needed_at=(min(layer_ids) - first_layer,),
        replicated=False,
        facts=(("layers", join(layer_ids)), ("states", ";".join(form))),
    )


def entry(resolved: Any, replicated: bool, *, draft: bool) -> DevicePool:
    """A `DevicePoolEntry` of SGLang's own resolver (DeepSeek V4, DSA): bytes that nobody here looks into."""
    order = [buffer for component in resolved.components for buffer in component]
    for buffer in order:
        if not dense(buffer[0]):
            raise refused(resolved.device_pool, f"a buffer of shape {tuple(buffer.shape)} has gaps in memory")
    rows = int(resolved._row_span)
    page_bytes = rows * sum(bytes_of_row(buffer) for buffer in order)
    return DevicePool(
        name=str(resolved.name.value),
        source=str(resolved.indices_from_pool.value),
        kind=type(resolved.device_pool).__name__,
        buffers=buffers_of(resolved.device_pool, order),
        page_tokens=int(resolved.page_size),
        page_rows=rows,
        layout=PageLayout.opaque(page_bytes, page_tokens=int(resolved.page_size), tag=TAG),
        needed_at=(min(resolved.layer_mapping, default=0),),
        replicated=replicated,
        facts=(
            ("layers", join(sorted(resolved.layer_mapping))),
            ("pieces", join(bytes_of_row(buffer) for buffer in order)),
            ("dtypes", join(str(buffer.dtype) for buffer in order)),
        ),
        draft=draft,
    )


def _tokens(
    name: str,
    source: str,
    pool: Any,
    order: Sequence[Any],
    layout: PageLayout,
    needed_at: Mapping[int, int],
    page_tokens: int,
    *,
    replicated: bool,
) -> DevicePool:
    """A pool in which a row is a token."""
    by_layer = tuple(needed_at[layer] for layer in range(layout.layers))
    return DevicePool(
        name=name,
        source=source,
        kind=type(pool).__name__,
        buffers=buffers_of(pool, order),
        page_tokens=page_tokens,
        page_rows=page_tokens,
        layout=layout,
        needed_at=by_layer,
        replicated=replicated,
        facts=(
            ("layers", join(by_layer)),
            ("dtype", str(pool.dtype)),
            ("store_dtype", str(pool.store_dtype)),
        ),
    )


def buffers_of(pool: Any, order: Sequence[Any]) -> Buffers:
    devices = {str(buffer.device) for buffer in order}
    device = order[0].device
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        raise refused(pool, f"its memory is on {', '.join(sorted(devices))}, not on one CUDA device")
    return Buffers(
        base=np.array([buffer.data_ptr() for buffer in order], np.uint64),
        stride=np.array([buffer.stride(0) * buffer.element_size() for buffer in order], np.int64),
        row_bytes=np.array([bytes_of_row(buffer) for buffer in order], np.int64),
        rows=min(int(buffer.shape[0]) for buffer in order),
        device=int(device.index or 0) if device.type == "cuda" else None,
        owner=tuple(order),
    )


def join(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def bytes_of_row(buffer: Any) -> int:
    return int(math.prod(buffer.shape[1:]) * buffer.element_size())


def dense(row: Any) -> bool:
    """Whether a row fills its memory without a gap, whatever the order of its axes."""
    expected = 1
    for stride, size in sorted(zip(row.stride(), row.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _check(pool: Any, buffer: Any, row: tuple[int, ...]) -> None:
    if tuple(buffer.shape[1:]) != row or not buffer.is_contiguous() or buffer.dtype != pool.store_dtype:
        raise refused(
            pool,
            f"a buffer is {buffer.dtype} of shape {tuple(buffer.shape)} and strides {buffer.stride()}; known are contiguous ones "
            f"of {pool.store_dtype} and [tokens, {', '.join(map(str, row))}]",
        )


def layers_of(pool: Any, buffers: int, needed_at: Mapping[int, int]) -> int:
    if getattr(pool, "layer_shard_enabled", False):
        raise refused(pool, "its layers are sharded over ranks")
    if buffers == 0:
        raise refused(pool, "it holds no layers")
    if sorted(needed_at) != list(range(buffers)):
        raise refused(pool, f"it has {buffers} layers, and the model names {sorted(needed_at)}")
    return buffers


def _dtype(pool: Any) -> str:
    """The logical dtype: both kinds of fp8 lie in memory as uint8."""
    known = {
        "torch.float32": "float32",
        "torch.float16": "float16",
        "torch.bfloat16": "bfloat16",
        "torch.float8_e4m3fn": "fp8_e4m3",
        "torch.float8_e5m2": "fp8_e5m2",
    }
    if str(pool.dtype) not in known:
        raise refused(pool, f"KV of {pool.dtype} is not known; known: {', '.join(known)}")
    return known[str(pool.dtype)]


def plain(pool: Any, name: str) -> None:
    # A subclass may arrange its bytes in any way, so a class that only derives from a known one is not known.
    if type(pool).__name__ != name or not type(pool).__module__.startswith("sglang."):
        raise refused(pool, f"known at this place is {name}")


def refused(pool: Any, why: str) -> ConfigError:
    return ConfigError(
        f"gdsstore's linker cannot move the pages of a {type(pool).__name__}: {why}. {INSTEAD}",
        pool=type(pool).__name__,
    )

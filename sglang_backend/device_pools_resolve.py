"""Which device pools a model has. What is not known is refused, with the class and what to do: a hit without one of the model's
pools would be silent garbage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gdsstore import ConfigError
from sglang_backend import device_pools_kinds as kinds
from sglang_backend.device_pools import DevicePool
from sglang_backend.device_pools_draft import draft, has_draft
from sglang_backend.device_pools_scaled import attention

# SGLang resolves these itself. What it cannot (plain MHA and MLA, SWA) or only in part (Mamba) is described here.
RESOLVED_BY_SGLANG = ("DeepSeekV4TokenToKVPool", "DSATokenToKVPool")


@dataclass(frozen=True, slots=True)
class DevicePools:
    """All pools of a rank. `first_layer` and `layers`: which layers of the model this rank computes."""

    pools: tuple[DevicePool, ...]
    first_layer: int
    layers: int

    def of(self, source: str) -> tuple[DevicePool, ...]:
        """The pools whose keys and indices come with SGLang's pool `source`."""
        return tuple(pool for pool in self.pools if pool.source == source)

    @property
    def device(self) -> int | None:
        return self.pools[0].buffers.device

    @property
    def page_bytes(self) -> int:
        """Of the largest page."""
        return max(pool.layout.page_bytes for pool in self.pools)


def resolve(params: Any, components: Iterable[Any]) -> DevicePools:
    """The pools behind SGLang's `CacheInitParams`. `components`: the tree's ComponentTypes.

    Raises ConfigError for a pool, or a combination of pools, that is not known.
    """
    names = {component.name for component in components}
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    page_tokens = int(params.page_size)
    name = type(pool).__name__
    if name in RESOLVED_BY_SGLANG:
        return _resolved_by_sglang(pool, params, page_tokens, names)
    if name == "SWAKVPool" and names in ({"FULL", "SWA"}, {"FULL", "SWA", "MAMBA"}):
        found, layers = _swa(pool, page_tokens)
    elif name == "HybridLinearKVPool" and names == {"FULL", "MAMBA"}:
        found, layers = _linear(pool, page_tokens)
    elif names == {"FULL"}:
        found, layers = [_single(pool, page_tokens)], int(pool.layer_num)
    else:
        raise ConfigError(
            f"gdsstore's linker does not know a {name} with the components {', '.join(sorted(names))}. {kinds.INSTEAD}",
            pool=name,
        )
    first = int(pool.start_layer)
    found += draft(params, found[0], page_tokens)
    if "MAMBA" in names:
        found.append(kinds.mamba(params.req_to_token_pool, first))
        layers = max(layers, 1 + max(params.req_to_token_pool.mamba_map) - first)
    return DevicePools(tuple(found), first, layers)


def _single(pool: Any, page_tokens: int) -> DevicePool:
    """One pool for all layers."""
    return attention(kinds.KV, kinds.KV, pool, {layer: layer for layer in range(pool.layer_num)}, page_tokens)


def _swa(pool: Any, page_tokens: int) -> tuple[list[DevicePool], int]:
    """Layers of full attention in one pool, those with a window in another."""
    where: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for layer, (local, windowed) in pool.layers_mapping.items():
        where[bool(windowed)][local] = layer - int(pool.start_layer)
    found = [
        attention(kinds.KV, kinds.KV, pool.full_kv_pool, where[False], page_tokens),
        attention(kinds.SWA, kinds.SWA, pool.swa_kv_pool, where[True], page_tokens),
    ]
    return found, 1 + max(max(each.values()) for each in where)


def _linear(pool: Any, page_tokens: int) -> tuple[list[DevicePool], int]:
    """Layers of full attention between layers that keep a state."""
    where = {
        local: layer - int(pool.start_layer) for layer, local in pool.full_attention_layer_id_mapping.items()
    }
    return [attention(kinds.KV, kinds.KV, pool.full_kv_pool, where, page_tokens)], 1 + max(where.values())


def _resolved_by_sglang(pool: Any, params: Any, page_tokens: int, names: set[str]) -> DevicePools:
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    try:
        group = resolve_hybrid_device_pool_group(
            kvcache=pool,
            page_size=page_tokens,
            params=params,
            components={ComponentType[name] for name in names},
        )
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"SGLang cannot say where the pages of a {type(pool).__name__} lie: {error}. {kinds.INSTEAD}"
        ) from error
    # SGLang appends the layers of a draft model to the target's, or says that it cannot.
    return DevicePools(
        tuple(kinds.entry(each, group.rank_replicated, draft=has_draft(params)) for each in group.entries),
        int(getattr(pool, "start_layer", 0) or 0),
        int(group.num_layers),
    )

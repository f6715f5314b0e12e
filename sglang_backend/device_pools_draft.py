"""The KV of a draft model (EAGLE, MTP), which SGLang keeps in pools of its own: at the target's indices, and with its pages' keys.

SGLang names these pools in its CacheInitParams; what it names nowhere it does not use together with a linker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_backend import device_pools_kinds as kinds
from sglang_backend.device_pools import Buffers, DevicePool
from sglang_backend.device_pools_scaled import attention

DRAFT = "draft"


def has_draft(params: Any) -> bool:
    return bool(
        params.mtp_draft_device_pools or params.sidecar_draft_device_pools or params.mtp_draft_mamba_pools
    )


def draft(params: Any, target: DevicePool, page_tokens: int) -> list[DevicePool]:
    """The draft model's KV as one pool, or nothing where there is none. `target`: the pool of the target's full attention.

    Raises ConfigError for a draft model's pools that are not known.
    """
    if params.mtp_draft_mamba_pools:
        raise kinds.refused(params.mtp_draft_mamba_pools[0], "it holds states of a draft model")
    # The draft model runs behind the target, so that its KV must have come before the target's last layer.
    before = max(target.needed_at)
    parts = []
    for each in (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools):
        # The draft model of a hybrid has its one attention layer in there.
        pool = each.full_kv_pool if type(each).__name__ == "HybridLinearKVPool" else each
        layers = int(getattr(pool, "layer_num", 1))
        part = attention(DRAFT, target.source, pool, dict.fromkeys(range(layers), before), page_tokens)
        if _tokens(part) < _tokens(target):
            raise kinds.refused(
                pool,
                f"it has room for {_tokens(part)} tokens of a draft model, and the target's pool for {_tokens(target)}: "
                "its indices cannot be the target's",
            )
        parts.append((pool, part))
    if not parts:
        return []
    pool, first = parts[0]
    if any(_form(part) != _form(first) for _, part in parts):
        raise kinds.refused(pool, "the layers of the draft model are not alike")
    return [dataclasses.replace(_joined([part for _, part in parts]), draft=True)]


def _tokens(part: DevicePool) -> int:
    return part.buffers.rows * part.page_tokens // part.page_rows


def _form(part: DevicePool) -> tuple[object, ...]:
    return part.kind, part.layout, part.page_rows, part.facts


def _joined(parts: Sequence[DevicePool]) -> DevicePool:
    """Pools of a layer or more each, as one whose pages hold the layers of all."""
    first, count = parts[0], len(parts)
    layout = dataclasses.replace(
        first.layout, layers=count * first.layout.layers, page_bytes=count * first.layout.page_bytes
    )
    buffers = Buffers(
        base=np.concatenate([part.buffers.base for part in parts]),
        stride=np.concatenate([part.buffers.stride for part in parts]),
        row_bytes=np.concatenate([part.buffers.row_bytes for part in parts]),
        rows=min(part.buffers.rows for part in parts),
        device=first.buffers.device,
        owner=tuple(part.buffers.owner for part in parts),
    )
    return dataclasses.replace(first, buffers=buffers, layout=layout, needed_at=count * first.needed_at)

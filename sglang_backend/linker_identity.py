"""Which rank this is, and the namespace of each of its device pools."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gdsstore import ConfigError, Namespace, Parallelism
from sglang_backend.device_pools import DevicePool
from sglang_backend.device_pools_kinds import INSTEAD
from sglang_backend.device_pools_resolve import DevicePools
from sglang_backend.identity import Model, identify_model
from sglang_backend.server_facts import Facts

IDENTITY_VERSION = "1"
SAID_IN = "linker_extra_config"


@dataclass(frozen=True, slots=True)
class Rank:
    """`writes_shared`: whether this rank stores the pages that are equal on all tensor-parallel ranks. One does on each machine,
    since each has drives of its own."""

    parallelism: Parallelism
    writes_shared: bool


def this_rank(params: Any, server_args: Any) -> Rank:
    """`params`: SGLang's CacheInitParams. Raises ConfigError for a kind of parallelism that is not known."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if int(getattr(parallel, "attn_dcp_size", 1) or 1) > 1:
        raise ConfigError(
            f"gdsstore's linker does not know decode context parallelism: a page is spread over ranks. {INSTEAD}"
        )
    if params.pp_size > 1:
        # Its HiCache tells the later stages what the first one decided; its linker reduces hits, completions and failed loads over
        # the ranks of a stage only.
        raise ConfigError(
            "gdsstore's linker does not know pipeline parallelism: SGLang 0.5.23 lets each stage decide for itself how much of a "
            f"prompt it loads, and stages whose stores differ in one page would compute with different lengths. {INSTEAD}"
        )
    rank, size = 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    # As SGLang's launcher places ranks: whole tensor-parallel groups on a machine, or one group over whole machines.
    machines = max(int(getattr(server_args, "nnodes", 1) or 1) // max(params.pp_size, 1), 1)
    on_machine = max(int(getattr(server_args, "tp_size", size) or size) // machines, 1)
    return Rank(
        Parallelism(
            tp_rank=rank,
            tp_size=size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            cp_rank=params.attn_cp_rank,
            cp_size=params.attn_cp_size,
        ),
        rank % on_machine == 0,
    )


def model_of(weights: str, server_args: Any) -> Model:
    """Raises ConfigError where nothing tells which weights are served."""
    return identify_model(None, weights, server_args, said_in=SAID_IN)


def draft_model_of(weights: str, server_args: Any) -> Facts:
    """What tells the draft model from another one; nothing where it comes with the target's weights. `weights`: what the user said.

    Raises ConfigError where nothing tells which weights it has.
    """
    path = str(getattr(server_args, "speculative_draft_model_path", None) or "")
    own = path not in ("", str(getattr(server_args, "model_path", "")))
    facts = [
        (f"draft_{fact}", str(getattr(server_args, f"speculative_draft_{fact}", None)))
        for fact in ("model_quantization", "load_format")
    ]
    if not (own or weights):
        return tuple(facts)
    revision = getattr(server_args, "speculative_draft_model_revision", None)
    files = SimpleNamespace(model_path=path, revision=revision)
    try:
        found = weights or identify_model(path, "", files, said_in=SAID_IN).weights
    except ConfigError as error:
        raise ConfigError(
            f'cannot tell which weights the draft model {path!r} stands for: add "draft_weights": "<revision or digest>" to '
            f"{SAID_IN}, and change it with the weights, or two draft models will share pages"
        ) from error
    return (("draft_weights", found), *facts)


def namespace_of_pool(
    model: Model, rank: Rank, pools: DevicePools, pool: DevicePool, draft_model: Facts = ()
) -> Namespace:
    """The namespace of a pool's pages. Not that of the HiCache backend: its pages lie in another order."""
    parallelism = rank.parallelism
    if pool.replicated:
        parallelism = Parallelism(
            pp_rank=parallelism.pp_rank,
            pp_size=parallelism.pp_size,
            cp_rank=parallelism.cp_rank,
            cp_size=parallelism.cp_size,
        )
    facts = [(f"pool_{name}", value) for name, value in (("class", pool.kind), *pool.facts)]
    return Namespace(
        model=model.name,
        weights=model.weights,
        layout=pool.layout,
        pool=pool.name,
        layers=(pools.first_layer, pools.first_layer + pools.layers),
        parallelism=parallelism,
        extra=(
            *model.facts,
            *facts,
            *(draft_model if pool.draft else ()),
            ("sglang_linker", IDENTITY_VERSION),
        ),
    )

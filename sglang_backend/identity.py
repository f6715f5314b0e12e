"""From SGLang's configuration and a host pool to the namespace of its pages.

The page hash covers tokens, salt and LoRA. All else that the bytes depend on goes into the namespace: model, weights, KV dtype,
the pool and its memory layout, layers, and the ranks where each holds other bytes.
"""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Any

from gdsstore import ArgumentError, ConfigError, Namespace, PageLayout, Parallelism, weights_digest
from sglang_backend.pools import HostPool
from sglang_backend.server_facts import Facts, facts_of, local_folder
from sglang_backend.weight_updates import updates

log = logging.getLogger("gdsstore.sglang")

MAMBA = "mamba"
IDENTITY_VERSION = "1"
STORAGE_FLAG = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True, slots=True)
class Model:
    """What all pools of a server share."""

    name: str
    weights: str
    facts: Facts


def identify_model(
    served_name: str | None, weights: str, server_args: Any, *, said_in: str = STORAGE_FLAG
) -> Model:
    """`weights`: what the user said, or empty; `said_in`: where to say it, for the error.

    Raises ConfigError where nothing tells which weights are served.
    """
    path = getattr(server_args, "model_path", None) or ""
    name = served_name or getattr(server_args, "served_model_name", None) or path
    if not name:
        raise ConfigError("the model has no name: start the server with --served-model-name")
    version = ("sglang", _sglang_version())  # another one may arrange the same pool in another way
    weights = weights or _weights(path, getattr(server_args, "revision", None), said_in)
    return Model(name, weights, (version, *facts_of(server_args, said_in)))


def namespace_of(model: Model, config: Any, pool: HostPool, *, flat: bool = False) -> Namespace:
    """The namespace of a pool's pages. `config`: SGLang's HiCacheStorageConfig. `flat`: pages as the older interface joins them."""
    facts = [*model.facts, *pool.facts(), ("sglang_identity", IDENTITY_VERSION)]
    if flat and getattr(pool.pool, "layout", "") == "layer_first" and len(pool.length) > 1:
        facts.append(("order", "flat"))  # all K layers, then all V; the pieces alternate
    return Namespace(
        model=model.name,
        weights=model.weights,
        layout=PageLayout.opaque(pool.page_bytes, page_tokens=pool.page_tokens, tag="sglang-host"),
        pool=pool.name,
        layers=pool.layers(),
        parallelism=_parallelism(config, replicated=bool(config.is_mla_model) and pool.name != MAMBA),
        extra=tuple(facts),
    )


def _sglang_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _parallelism(config: Any, replicated: bool) -> Parallelism:
    # dp_rank is left out: groups of attention data parallelism hold equal pages, and share them.
    return Parallelism(
        tp_rank=0 if replicated else config.tp_rank,
        tp_size=1 if replicated else config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        dcp_rank=config.dcp_rank,
        dcp_size=config.dcp_size,
    )


def _weights(path: str, revision: str | None, said_in: str) -> str:
    if updates():
        raise ConfigError(
            f"the weights of this server were changed since it started, and are not those in the files of {path!r}: "
            f'add "weights": "<revision or digest>" to {said_in}'
        )
    folder = local_folder(path, revision)
    if folder:
        try:
            return weights_digest(folder)
        except ArgumentError as error:
            log.warning("the weights in %s could not be identified: %s", folder, error)
    raise ConfigError(
        f'cannot tell which weights {path or "the model"!r} stands for: add "weights": "<revision or digest>" to '
        f"{said_in}, and change it with the weights, or two models will share pages"
    )

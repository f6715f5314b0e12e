"""What of a server's arguments changes what a page holds, beside what its pools and its weights tell."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from gdsstore import ConfigError

log = logging.getLogger("gdsstore.sglang")

Facts: TypeAlias = tuple[tuple[str, str], ...]

ALWAYS = (
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "dtype",
    "load_format",
    "json_model_override_args",  # RoPE scaling, say: keys are stored after it
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
# What hardly anybody sets; left out where it is not set.
IF_SET = (
    "modelopt_quant",
    "quantize_and_serve",
    "rl_quant_profile",
    "custom_weight_loader",
    "model_loader_extra_config",
    # Who asks for the same bits each time must not get those of a server that did not.
    "enable_deterministic_inference",
    "rl_on_policy_target",
)
NOT_SET = ("", "None", "False", "{}", "[]")
# Files whose content counts: they may be written anew under their name.
FILES = ("quantization_param_path", "decrypted_config_file")
LORA = ("lora_name", "lora_path")
ADAPTER_FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")


def facts_of(server_args: Any, said_in: str) -> Facts:
    """Pairs of names and values. `said_in`: where settings of the backend are given, for the error.

    Raises ConfigError for an adapter whose weights nothing tells.
    """
    given = {name: getattr(server_args, name, None) for name in (*ALWAYS, *IF_SET, *FILES)}
    facts = [(f"server_{name}", str(given[name])) for name in ALWAYS if given[name] is not None]
    facts += [(f"server_{name}", str(given[name])) for name in IF_SET if str(given[name]) not in NOT_SET]
    for name in FILES:
        file = Path(given[name] or "")
        if file.is_file():
            facts.append((f"server_{name}_content", _content(file)))
    adapters = getattr(server_args, "lora_paths", None) or ()
    if adapters:
        facts.append(("server_lora", _adapters(adapters, said_in)))
    return tuple(facts)


def local_folder(path: str, revision: str | None) -> str | None:
    """Where a model or an adapter lies on this machine: `path` itself, or where the hub's client has put it, if it has."""
    if os.path.isdir(path):
        return path
    if not path:
        return None
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception as error:
        # Not installed, not downloaded, not a repository: all mean that we do not know.
        log.info("no local snapshot of %s: %s", path, error)
        return None


def _adapters(adapters: Any, said_in: str) -> str:
    """A digest of the adapters of `--lora-paths`. SGLang's keys hold an adapter's name and path, and these stay when it is trained
    anew. (An adapter that is loaded later has a random number in its keys.)"""
    digest = hashlib.sha256()
    for name, path in sorted(_named(adapter) for adapter in adapters):
        folder = local_folder(path, None)
        files = sorted({file for kind in ADAPTER_FILES for file in Path(folder).glob(kind)}) if folder else []
        if not files:
            raise ConfigError(
                f"cannot tell which weights the LoRA adapter {name!r} has: {path!r} is neither a folder with them nor a local "
                f"snapshot. Give a folder in --lora-paths, or load the adapter at run time, or leave out gdsstore ({said_in})"
            )
        for part in (name, path, *(f"{file.name} {_content(file)}" for file in files)):
            digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:32]


def _named(adapter: Any) -> tuple[str, str]:
    """Name and path, of SGLang's record or of that as a mapping."""
    record = adapter if isinstance(adapter, Mapping) else {name: getattr(adapter, name, "") for name in LORA}
    name, path = (str(record.get(each) or "") for each in LORA)
    return name, path


def _content(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]

"""The backend's part of `--hicache-storage-backend-extra-config`.

    path          directory of the store, or a list of directories, one a drive (required)
    weights       what identifies the model's weights, where its files do not tell: a revision, a digest
    call_limit_s  every call returns within this time, as misses if need be (default 5, below SGLang's 10 s for a thread to end)
    host_allocator  true: the host pool in huge pages, bound to a NUMA node, already touched (sglang_backend/host_allocator.py)

and every setting of gdsstore by its name (docs/settings.md): capacity, durability, engine, encryption_key_file, ...
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gdsstore import Config, ConfigError

# What SGLang reads itself and leaves in the dictionary, or removes from it.
SGLANGS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
    "file_storage_path",
    "allocator",
)
OURS = ("path", "weights", "call_limit_s", "host_allocator")
CALL_LIMIT_S = 5.0
SHORTEST_CALL_S = 0.2
LONGEST_CALL_S = 9.0  # a flush joins each storage thread for 10 s, then the server ends
# Not the key itself: command lines are seen by all users, and logged.
SETTINGS = tuple(field.name for field in fields(Config) if field.init and field.name != "encryption_key")


@dataclass(frozen=True, slots=True)
class Options:
    paths: tuple[str, ...]
    weights: str
    call_limit_s: float
    config: Config


def parse_options(extra_config: Mapping[str, Any] | None) -> Options:
    """Raises ConfigError, with the key that is wrong and what was probably meant."""
    given = {name: value for name, value in (extra_config or {}).items() if name not in SGLANGS}
    unknown = [name for name in given if name not in OURS and name not in SETTINGS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], (*OURS, *SETTINGS, *SGLANGS), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join((*OURS, *SETTINGS))}"
        raise ConfigError(f"unknown key {unknown[0]!r} in the storage backend's extra config; {hint}")
    limit = _seconds(given.pop("call_limit_s", CALL_LIMIT_S))
    # Read by host_allocator.py, before there is a backend.
    if not isinstance(given.pop("host_allocator", False), bool):
        raise ConfigError("host_allocator must be true or false")
    weights = given.pop("weights", "")
    if not isinstance(weights, str):
        raise ConfigError(f"weights must be a string, not {weights!r}")
    paths = _paths(given.pop("path", None))
    given.setdefault("io_deadline_s", 0.8 * limit)  # the rest is for what the drive has not let go of by then
    config = Config.load(**given)
    if config.io_deadline_s > limit:
        raise ConfigError(
            f"io_deadline_s={config.io_deadline_s} must not be longer than call_limit_s={limit}"
        )
    return Options(paths, weights, limit, config)


def _seconds(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not SHORTEST_CALL_S <= value <= LONGEST_CALL_S:
        raise ConfigError(
            f"call_limit_s must be a number from {SHORTEST_CALL_S} to {LONGEST_CALL_S}, not {value!r}"
        )
    return float(value)


def _paths(value: Any) -> tuple[str, ...]:
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)) or not paths or not all(isinstance(p, str) and p for p in paths):
        raise ConfigError(
            "the storage backend needs a directory on a local drive: "
            '"path": "/mnt/nvme0/kv" in --hicache-storage-backend-extra-config (a list for several drives)'
        )
    return tuple(paths)

"""`linker_extra_config` of `--unified-cache-external-linker-config`.

    path               directory of the store, or a list of directories, one a drive (required)
    weights            what identifies the model's weights, where its files do not tell: a revision, a digest
    draft_weights      the same of a draft model's (speculative decoding)
    path_policy        "auto", "direct" or "bounce": how pages reach the drive (the store's setting `path`)
    load_deadline_s    a load that has not ended after this time fails, and its requests are aborted (default 10)
    offload_deadline_s a save that has not ended after this time fails (default 30)
    backlog_pages      offloads that wait may hold this many pages of the device pool; further ones are dropped (default: a quarter)
    prefetch_deadline_s with a host cache: for how long a request waits, at the most, before its pages are needed (default 30)

and every other setting of gdsstore by its name (docs/settings.md): capacity, host_cache, durability, strict, ...
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gdsstore import Config, ConfigError

OURS = (
    "path",
    "weights",
    "draft_weights",
    "path_policy",
    "load_deadline_s",
    "offload_deadline_s",
    "backlog_pages",
    "prefetch_deadline_s",
)
# Not the key itself: command lines are seen by all users, and logged.
NOT_HERE = ("path", "encryption_key")
SETTINGS = tuple(field.name for field in fields(Config) if field.init and field.name not in NOT_HERE)
LOAD_DEADLINE_S = 10.0
OFFLOAD_DEADLINE_S = 30.0
PREFETCH_DEADLINE_S = 30.0
SHORTEST_S, LONGEST_S = 0.1, 240.0  # SGLang's watchdog ends a scheduler that stands still for 300 s


@dataclass(frozen=True, slots=True)
class LinkerOptions:
    paths: tuple[str, ...]
    weights: str
    draft_weights: str
    load_deadline_s: float
    offload_deadline_s: float
    prefetch_deadline_s: float
    backlog_pages: int | None
    config: Config


def parse_linker_options(extra_config: Mapping[str, Any] | None, *, on_device: bool) -> LinkerOptions:
    """`on_device`: whether the pools are in GPU memory. Raises ConfigError, with the key that is wrong and what was meant."""
    given = dict(extra_config or {})
    unknown = [name for name in given if name not in OURS and name not in SETTINGS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], (*OURS, *SETTINGS), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join((*OURS, *SETTINGS))}"
        raise ConfigError(f"unknown key {unknown[0]!r} in linker_extra_config; {hint}")
    weights, draft_weights = (_text(name, given.pop(name, "")) for name in ("weights", "draft_weights"))
    paths = _paths(given.pop("path", None))
    load_s = _seconds("load_deadline_s", given.pop("load_deadline_s", LOAD_DEADLINE_S))
    offload_s = _seconds("offload_deadline_s", given.pop("offload_deadline_s", OFFLOAD_DEADLINE_S))
    prefetch_s = _seconds("prefetch_deadline_s", given.pop("prefetch_deadline_s", PREFETCH_DEADLINE_S))
    backlog = _pages(given.pop("backlog_pages", None))
    if "path_policy" in given:
        given["path"] = given.pop("path_policy")
    if not on_device:
        # A drive that hangs would hold on to rows that SGLang gives to others; through the arena it holds nothing of SGLang's.
        given.setdefault("zero_copy", False)
    config = Config.load(**given)
    if on_device and config.encrypts:
        raise ConfigError(
            "the linker moves pages of GPU memory, which are not encrypted; leave out the key, or take the HiCache backend "
            "(--hicache-storage-backend), whose pages are in host memory"
        )
    return LinkerOptions(paths, weights, draft_weights, load_s, offload_s, prefetch_s, backlog, config)


def _paths(value: Any) -> tuple[str, ...]:
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)) or not paths or not all(isinstance(p, str) and p for p in paths):
        raise ConfigError(
            'the linker needs a directory on a local drive: "path": "/mnt/nvme0/kv" in linker_extra_config '
            "(a list for several drives)"
        )
    return tuple(paths)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {value!r}")
    return value


def _seconds(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not SHORTEST_S <= value <= LONGEST_S:
        raise ConfigError(f"{name} must be a number from {SHORTEST_S} to {LONGEST_S}, not {value!r}")
    return float(value)


def _pages(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"backlog_pages must be a whole number above 0, not {value!r}")
    return value

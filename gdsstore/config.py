"""The one config of a store. Each setting's meaning stands at its field; docs/settings.md is generated from here.

Sources, the later ones win: defaults, a TOML file, `GDSSTORE_<NAME>` in the environment, keywords. Nothing else in the library
reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gdsstore.choices import AutoOff, Durability, EngineName, GpuEngineName
from gdsstore.engines import routes
from gdsstore.engines.routes import PathSetting
from gdsstore.errors import ConfigError
from gdsstore.sealing import rules
from gdsstore.sealing.secret import Secret
from gdsstore.settings import Kind, Setting, choice, setting
from gdsstore.sizes import GiB, KiB, MiB, TiB, format_size
from gdsstore.sources import ENV_PREFIX, Given, env_name, from_environment, from_file
from gdsstore.tiers.policy import WritePolicy
from gdsstore.transfer.cost import CostSetting

MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = MiB, 16 * GiB
AUTO_SEGMENTS = 64  # a reclaim frees one of that many: fine enough to be gentle, coarse enough for large sequential writes
AUTO_SEGMENT_MIN_BYTES, AUTO_SEGMENT_MAX_BYTES = 16 * MiB, 256 * MiB

__all__ = [
    "SETTINGS",
    "AutoOff",
    "Config",
    "CostSetting",
    "Durability",
    "EngineName",
    "GpuEngineName",
    "PathSetting",
    "WritePolicy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a store, checked. Sizes are bytes (strings such as "4GiB" are read), times are seconds.

    Raises ConfigError for a value of the wrong type or out of range, and for values that do not fit together.
    """

    capacity: int | None = setting(
        None,
        "Space",
        Kind.SIZE,
        "Disk that the store may use, all volumes together, in physical bytes. "
        "None: what the store already has; a new store takes half of the free space of its volumes.",
        low=2 * MIN_SEGMENT_BYTES,
        optional=True,
    )
    segment_bytes: int = setting(
        0,
        "Space",
        Kind.SIZE,
        "Size of a segment, fixed when a store is made. 0: a 64th of the capacity as a power of two, 16MiB to 256MiB.",
        low=MIN_SEGMENT_BYTES,
        high=MAX_SEGMENT_BYTES,
        power_of_two=True,
        zero_is_automatic=True,
    )
    free_segments: int = setting(
        1,
        "Space",
        Kind.INTEGER,
        "Segments that the maintainer keeps free ahead of need, so that a save does not wait for a reclaim.",
        high=1024,
    )
    catalog_map_bytes: int = setting(
        0,
        "Space",
        Kind.SIZE,
        "Address space for the catalog, a bound on its file. 0: from the capacity.",
        low=MiB,
        high=16 * TiB,
        step=4 * KiB,
        zero_is_automatic=True,
    )
    grace_s: float = setting(
        30.0,
        "Space",
        Kind.SECONDS,
        "What was looked up within this time is not reclaimed, so that a reported hit stays loadable.",
        high=86400,
    )

    durability: Durability = choice(
        Durability.INTERVAL,
        "Safety",
        "When a saved page is on the drive for good. none: when the kernel gets to it (survives the death of the process, "
        "not a power loss); interval: at most sync_interval_s later; commit: before the page is visible. It holds for the process "
        "that saves the page: processes that share a store should agree on it.",
    )
    sync_interval_s: float = setting(
        1.0, "Safety", Kind.SECONDS, "Time between two syncs with durability = interval.", low=0.01, high=3600
    )
    verify: bool = setting(
        True,
        "Safety",
        Kind.SWITCH,
        "Check every loaded page against its checksum. Off, wrong bytes from a drive go unnoticed.",
    )
    io_deadline_s: float = setting(
        30.0,
        "Safety",
        Kind.SECONDS,
        "I/O that has not ended after this time fails, and its memory is not used again until the kernel lets go of it.",
        low=0.1,
        high=3600,
    )
    encryption_key_file: str | None = setting(
        None,
        "Safety",
        Kind.PATH,
        "File with the key that pages are encrypted with on the drives: 32 bytes, or 64 hex digits, or base64; only its owner may "
        "read it. None: pages are not encrypted. See docs/encryption.md.",
        optional=True,
    )
    encryption_key: Secret | None = setting(
        None,
        "Safety",
        Kind.KEY,
        "The key itself, as hex or base64, for secrets that come in the environment. Not from a config file.",
        optional=True,
    )

    engine: EngineName = choice(
        EngineName.AUTO,
        "Moving bytes",
        "What moves bytes between host memory and the drive. auto: nixl where it is installed and works, else posix.",
    )
    workers: int = setting(
        6,
        "Moving bytes",
        Kind.INTEGER,
        "Calls that move bytes at the same time. Two of them are kept from saves, so that loads need not wait.",
        low=1,
        high=256,
    )
    offload_budget_s: float = setting(
        30.0,
        "Moving bytes",
        Kind.SECONDS,
        "A save that waits longer than this for its turn is dropped and counted (FAILED_DROPPED).",
        low=0.01,
        high=3600,
    )
    drive_breaker: AutoOff = choice(
        AutoOff.AUTO,
        "Moving bytes",
        "Leave a drive alone that answers only with errors, or not at all: its pages miss at once, saves go elsewhere, and it is "
        "tried again, ever more seldom.",
    )
    volume_ops: int = setting(
        65536,
        "Moving bytes",
        Kind.INTEGER,
        "Pages under way on one volume at most, over all calls. Bytes are bounded by what the volume was found to need, 2 to 32 "
        "chunks; by 8 before that.",
        low=1,
        high=1 << 20,
    )
    cost_model: CostSetting = choice(
        CostSetting.OFF,
        "Moving bytes",
        "Whether a hit is worth its load, by what loads and prefills took lately. off: always; advise: `advise` says it, and is "
        "counted; enforce: `lookup` reports no more pages than are worth it.",
    )
    prefill_tokens_s: int = setting(
        0,
        "Moving bytes",
        Kind.INTEGER,
        "Tokens a second that the server computes, for cost_model. 0: from what it tells with `observe_prefill`.",
        low=1,
        high=10**9,
        zero_is_automatic=True,
    )
    chunk_bytes: int = setting(
        32 * MiB,
        "Moving bytes",
        Kind.SIZE,
        "The I/O of a call is cut into chunks of this size, so that checksums and the drive work at the same time.",
        low=64 * KiB,
        high=GiB,
        step=4 * KiB,
    )
    in_flight_ranges: int = setting(
        128,
        "Moving bytes",
        Kind.INTEGER,
        "Byte ranges that a store has under way on a drive at most. GPUDirect Storage was seen to hang at about 256.",
        low=1,
        high=4096,
    )
    posix_threads: int = setting(
        8, "Moving bytes", Kind.INTEGER, "Threads of the posix engine, for each drive.", low=1, high=256
    )
    max_open_files: int = setting(
        512, "Moving bytes", Kind.INTEGER, "Segment files that are kept open.", low=16, high=1 << 20
    )

    host_cache: int = setting(
        0,
        "Memory",
        Kind.SIZE,
        "Host memory for pages in front of the drives (L2), for each process. 0: none, and nothing can be prefetched.",
        high=16 * TiB,
        step=4 * KiB,
        zero_is_automatic=True,
    )
    write_policy: WritePolicy = choice(
        WritePolicy.WRITE_THROUGH,
        "Memory",
        "What a save does with a host cache. write_through: to the drive, and the page stays warm; write_back: to the drive when "
        "its room is needed, at a flush, or at close (what the process holds when it dies is lost); write_through_selective: to "
        "the drive at the second use; never: to the drive only.",
    )
    share_host_cache: bool = setting(
        False,
        "Memory",
        Kind.SWITCH,
        "Keep the host cache in memory that other processes of the same user can map and read, as the node daemon does for its "
        "clients. Huge pages cost a little more to get.",
    )
    daemon: AutoOff = choice(
        AutoOff.AUTO,
        "Memory",
        "Load from the shared host cache of a node daemon. auto: where the store directory has its socket, and this process has no "
        "host cache of its own; what comes from there is checked as if it came from the drive.",
    )
    staging_bytes: int = setting(
        256 * MiB,
        "Memory",
        Kind.SIZE,
        "Arena through which pages go that are not aligned in the caller's memory.",
        low=64 * KiB,
        high=TiB,
        step=4 * KiB,
    )
    zero_copy: bool = setting(
        True,
        "Memory",
        Kind.SWITCH,
        "Read and write aligned memory of the caller directly, without the arena.",
    )
    huge_pages: AutoOff = choice(
        AutoOff.AUTO, "Memory", "Ask for huge pages for arenas; what was granted is reported."
    )
    numa_node: int = setting(
        -1,
        "Memory",
        Kind.INTEGER,
        "NUMA node that arenas are bound to. -1: the node of the drive or GPU.",
        low=-1,
        high=1023,
    )
    pin_host: AutoOff = choice(
        AutoOff.AUTO, "Memory", "Pin arenas with cudaHostRegister. auto: where CUDA is present."
    )

    path: PathSetting = choice(
        PathSetting.AUTO,
        "GPU memory",
        "How pages in GPU memory reach the drive. auto: what is measured to be faster; direct: by cuFile; bounce: through pinned "
        "host memory. See docs/paths.md.",
    )
    strict: bool = setting(
        False,
        "GPU memory",
        Kind.SWITCH,
        "Refuse GPU memory where the direct path is not there, instead of going through host memory.",
    )
    gpu_engine: GpuEngineName = choice(
        GpuEngineName.AUTO,
        "GPU memory",
        "What calls cuFile. auto: kvikio where it is installed and works, else nixl (its GDS_MT plugin).",
    )
    gpu_in_flight: int = setting(
        32,
        "GPU memory",
        Kind.INTEGER,
        "Requests that cuFile is given at the same time. GPUDirect Storage was seen to hang at about 256.",
        low=1,
        high=128,
    )
    gpu_staging_bytes: int = setting(
        512 * MiB,
        "GPU memory",
        Kind.SIZE,
        "Memory on each GPU through which pages go; registered once, and bounded by BAR1 and by cuFile's limit of pinned memory.",
        low=MiB,
        high=64 * GiB,
        step=64 * KiB,
    )
    bounce_bytes: int = setting(
        128 * MiB,
        "GPU memory",
        Kind.SIZE,
        "Pinned host memory of the bounce path, for each GPU.",
        low=MiB,
        high=64 * GiB,
        step=4 * KiB,
    )
    measure_s: float = setting(
        2.0,
        "GPU memory",
        Kind.SECONDS,
        "How long the paths are measured on the volume, once; the result is kept with the store. 0: never, and the direct path is "
        "preferred until transfers have shown otherwise.",
        high=600,
    )

    maintain: bool = setting(
        True,
        "Upkeep",
        Kind.SWITCH,
        "This process may become the store's maintainer, which reclaims segments. At least one process should.",
    )
    maintain_interval_s: float = setting(
        0.25, "Upkeep", Kind.SECONDS, "Time between two looks of the maintainer.", low=0.01, high=3600
    )

    def __post_init__(self) -> None:
        for name in SETTINGS:
            given = Given(name, getattr(self, name), "given to Config", written=name)
            object.__setattr__(self, name, _read(given))
        _check_together({name: getattr(self, name) for name in SETTINGS}, {})

    @classmethod
    def load(
        cls, file: str | os.PathLike[str] | None = None, env: Mapping[str, str] = os.environ, **keywords: Any
    ) -> Config:
        """The config from a TOML file (`file`, else GDSSTORE_CONFIG), the environment and keywords; the later ones win.

        A keyword that is None counts as not given, so that a caller can hand on its own optional arguments.
        Raises ConfigError for unknown names (with the nearest known one) and wrong values, saying where they came from.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        from_keywords = (
            Given(name, value, f"keyword {name}", written=name)
            for name, value in keywords.items()
            if value is not None or name not in SETTINGS
        )
        in_file = tuple(from_file(file, env))
        for given in in_file:
            if given.name in SETTINGS and SETTINGS[given.name].kind is Kind.KEY:
                raise ConfigError(
                    f"{given.name} must not stand in a config file; name a file of its own in encryption_key_file",
                    source=given.source,
                )
        for given in (*in_file, *from_environment(env), *from_keywords):
            values[given.name], sources[given.name] = _read(given), given.source
        _check_together(DEFAULTS | values, sources)
        return cls(**values)

    @property
    def encrypts(self) -> bool:
        """Whether pages are encrypted on the drives."""
        return self.encryption_key_file is not None or self.encryption_key is not None

    def segment_bytes_for(self, capacity: int) -> int:
        """The size in bytes of the segments of a new store of `capacity` bytes.

        Raises ConfigError where the capacity has no room for the segments that a store needs.
        """
        automatic = 1 << max(capacity // AUTO_SEGMENTS, 1).bit_length() - 1
        automatic = min(max(automatic, AUTO_SEGMENT_MIN_BYTES), AUTO_SEGMENT_MAX_BYTES)
        segment_bytes = self.segment_bytes or automatic
        _check_room(capacity, segment_bytes, self.free_segments, {})
        return segment_bytes


SETTINGS: dict[str, Setting] = {f.name: f.metadata["setting"] for f in dataclasses.fields(Config)}
DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}


def _read(given: Given) -> Any:
    if given.name not in SETTINGS:
        raise _unknown(given)
    try:
        return SETTINGS[given.name].read(given.value, given.from_text)
    except ValueError as error:
        if SETTINGS[given.name].kind is Kind.KEY:  # neither the value nor what was said of it
            raise ConfigError(f"{given.written} {error}", source=given.source) from None
        raise ConfigError(f"{given.written} {error}", value=repr(given.value), source=given.source) from error


def _unknown(given: Given) -> ConfigError:
    near = difflib.get_close_matches(given.name.lower(), SETTINGS, 1)
    suggestion = "docs/settings.md lists them all"
    if near:
        in_environment = given.written.startswith(ENV_PREFIX)
        suggestion = f"did you mean {env_name(near[0]) if in_environment else near[0]}?"
    return ConfigError(f"unknown setting {given.written}; {suggestion}", source=given.source)


def _check_together(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    routes.check(values["path"], values["strict"])
    rules.check(values)
    if values["chunk_bytes"] > values["staging_bytes"]:
        _refuse(
            "staging_bytes must hold at least one chunk_bytes",
            values,
            sources,
            "staging_bytes",
            "chunk_bytes",
        )
    # A store that is there has a segment size of its own, so the automatic size is checked where a store is made.
    if values["capacity"] is not None and values["segment_bytes"]:
        _check_room(values["capacity"], values["segment_bytes"], values["free_segments"], sources)


def _check_room(capacity: int, segment_bytes: int, free_segments: int, sources: Mapping[str, str]) -> None:
    needed = (1 + max(1, free_segments)) * segment_bytes
    if capacity < needed:
        values = {"capacity": capacity, "segment_bytes": segment_bytes, "free_segments": free_segments}
        _refuse(
            f"capacity must hold a segment and the free ones beside it, {format_size(needed)} or more",
            values,
            sources,
            *values,
        )


def _refuse(message: str, values: Mapping[str, Any], sources: Mapping[str, str], *names: str) -> None:
    facts = {name: SETTINGS[name].show(values[name]) for name in names}
    raise ConfigError(message, **{n: f"{v} ({sources[n]})" if n in sources else v for n, v in facts.items()})

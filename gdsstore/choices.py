"""The settings that are a choice between words."""

from __future__ import annotations

from enum import StrEnum


class Durability(StrEnum):
    """When a saved page is on the drive for good."""

    NONE = "none"  # when the kernel gets to it; survives the death of the process
    INTERVAL = "interval"  # at most `sync_interval_s` later
    COMMIT = "commit"  # before it is visible


class EngineName(StrEnum):
    AUTO = "auto"
    NIXL = "nixl"
    POSIX = "posix"


class GpuEngineName(StrEnum):
    AUTO = "auto"
    KVIKIO = "kvikio"
    NIXL = "nixl"


class AutoOff(StrEnum):
    AUTO = "auto"
    OFF = "off"

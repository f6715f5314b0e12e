"""Linkers in sizes that suit a unit test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Small segments, little memory, no upkeep behind the test's back.
SETTINGS: dict[str, Any] = {
    "weights": "test",
    "capacity": "64MiB",
    "segment_bytes": "4MiB",
    "engine": "posix",
    "posix_threads": 2,
    "workers": 4,
    "staging_bytes": "8MiB",
    "chunk_bytes": "256KiB",
    "huge_pages": "off",
    "free_segments": 0,
    "catalog_map_bytes": "64MiB",
    "maintain_interval_s": 3600,
}


def extra_config(folder: Path, **settings: Any) -> dict[str, Any]:
    """As the linker gets it."""
    return {"path": str(folder), **SETTINGS, **settings}


def linker_config(folder: Path, **settings: Any) -> dict[str, Any]:
    """The value of `--unified-cache-external-linker-config`."""
    return {
        "linker": "GdsStoreLinker",
        "linker_module_path": "sglang_backend.linker",
        "linker_extra_config": extra_config(folder, **settings),
    }

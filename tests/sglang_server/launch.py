"""How the servers of these tests are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server import StorageOptions, dynamic_storage

REPO = Path(__file__).resolve().parents[2]
PLUGINS = Path(__file__).resolve().parent / "plugins"

# Requests that run together are computed in other shapes than alone, and so in another order of additions. In bfloat16 that
# now and then decides between two tokens; in float32 it is far below what one wrong page does (FLOAT32_TOLERANCE).
FLOAT32 = ("--dtype", "float32", "--max-running-requests", "8")

CAPACITY, SEGMENT_BYTES = "256MiB", "16MiB"


def gdsstore_storage(
    folder: Path,
    *,
    settings: dict[str, Any] | None = None,
    prefetch_policy: str = "wait_complete",
    write_policy: str = "write_through",
    host_to_device_ratio: float = 2.0,
) -> StorageOptions:
    """The backend on a store in `folder`. `settings`: of gdsstore, beside those of a small store."""
    return dynamic_storage(
        "sglang_backend.storage",
        "GdsStoreHiCache",
        config={
            "path": str(folder),
            "capacity": CAPACITY,
            "segment_bytes": SEGMENT_BYTES,
            **(settings or {}),
        },
        prefetch_policy=prefetch_policy,
        write_policy=write_policy,
        host_to_device_ratio=host_to_device_ratio,
    )


def backend_environment(*, plugins: bool = False, **variables: str) -> dict[str, str]:
    """What a server needs to import the backend; `plugins`: and to run MLA (plugins/mla_on_cpu.py)."""
    folders = [REPO, PLUGINS] if plugins else [REPO]
    return {"PYTHONPATH": ":".join(map(str, folders)), **variables}

"""The result as tables."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from gdsstore.sizes import format_size


def tables(result: dict[str, Any]) -> list[RenderableType]:
    moved = Table(
        "page", "direction", "backend", "GB/s", "ceiling GB/s", "ratio", "CPU s/GB", title="HiCache, batches"
    )
    for row in result["rows"]:
        moved.add_row(
            format_size(row["page_bytes"]),
            row["direction"],
            row["backend"],
            f"{row['gbps']:.2f}",
            f"{row['ceiling_gbps']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['cpu_s_per_gb']:.3f}",
        )
    asked = Table("pages", "backend", "128 keys, us", "start, ms", "files", title="HiCache, look-ups")
    for row in sorted(result["lookups"], key=lambda row: int(row["pages"])):
        asked.add_row(
            f"{row['pages']:,}",
            row["backend"],
            f"{row['exists_us']:.0f}",
            f"{row['start_s'] * 1e3:.1f}",
            f"{row['files']:,}",
        )
    left_out = [f"left out: {name}: {why}" for name, why in result["peers_left_out"].items()]
    return [moved, asked, *left_out]

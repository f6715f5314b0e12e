"""The result as tables."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table


def tables(result: dict[str, Any]) -> list[RenderableType]:
    alone = Table(
        *("pages", "GB/s", "ceiling GB/s", "ratio", "with copies", "first layer ms", "total ms"),
        *("scheduler us/page", "CPU s/GB", "queued ms"),
        title="The linker's restores, device pool in host memory",
    )
    for row in result["rows"]:
        alone.add_row(
            str(row["pages"]),
            f"{row['gbps']:.2f}",
            f"{row['ceiling_gbps']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['copy_ratio']:.3f}",
            f"{row['first_layer_s'] * 1e3:.1f}",
            f"{row['total_s'] * 1e3:.1f}",
            f"{row['scheduler_us_per_page']:.2f}",
            f"{row['cpu_s_per_gb']:.3f}",
            f"{row['queued_s'] * 1e3:.1f}",
        )
    beside = Table(
        *("pages", "forward / I/O", "I/O ms", "forward ms", "first layer ms", "total ms"),
        *("total / forward", "total / slower"),
        title="Beside a forward",
    )
    for row in result["overlaps"]:
        beside.add_row(
            str(row["pages"]),
            f"{row['factor']:g}",
            *(f"{row[name] * 1e3:.1f}" for name in ("io_s", "forward_s", "first_layer_s", "total_s")),
            f"{row['to_compute']:.3f}",
            f"{row['to_slower']:.3f}",
        )
    peers = Table("pages", "backend", "GB/s", "ceiling GB/s", "ratio", title="HiCache, storage to host pool")
    for row in result["peers"]:
        peers.add_row(
            str(row["pages"]),
            row["backend"],
            f"{row['gbps']:.2f}",
            f"{row['ceiling_gbps']:.2f}",
            f"{row['ratio']:.3f}",
        )
    return [alone, beside, peers]

"""The result as a table."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table


def tables(result: dict[str, Any]) -> list[RenderableType]:
    table = Table(
        *("destination", "pages", "forward / I/O", "I/O GB/s", "I/O ms", "forward ms", "first group ms"),
        *("total ms", "ratio", "groups", "meets"),
        title=f"Layer-wise loads beside a forward (GPU: {result['gpu']['kind']})",
    )
    for row in result["rows"]:
        table.add_row(
            row["destination"],
            str(row["pages"]),
            f"{row['factor']:g}",
            f"{row['io_gbps']:.2f}",
            *(f"{row[name] * 1e3:.1f}" for name in ("io_s", "forward_s", "first_group_s", "total_s")),
            f"{row['ratio']:.3f}",
            str(row["groups"]),
            "yes" if row["meets"] else "NO",
        )
    return [table, *(f"not measured: device: {why}" for why in result["device_missing"])]

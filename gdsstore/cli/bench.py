"""`gdsstore bench host | lookup | open`: what this machine does, as ratios against a ceiling taken in the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gdsstore.bench.host import bench_host
from gdsstore.bench.lookup import bench_lookup
from gdsstore.bench.opening import bench_open
from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

Directory = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="A directory on the drive to measure; the bench works in a new folder in it. Default: here.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller rounds: under 40 seconds.")]
PageCount = Annotated[int, typer.Option("--pages", help="Pages in the store.", min=1)]

QUICK_PAGES = 1_000_000


@contextmanager
def _scratch(directory: Path | None) -> Iterator[Path]:
    """A new folder on the drive in question; everything that the bench writes is removed with it."""
    where = directory or Path.cwd()
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gdsstore-bench-", dir=where) as scratch:
        yield Path(scratch)


@app.command()
def host(store: Directory = None, quick: Quick = False, json: JsonFile = None, quiet: Quiet = False) -> None:
    """Save and load through the public API, verified, at 256 KiB, 1 MiB and 4 MiB, against raw NIXL io_uring (and fio)."""
    output = Output(json, quiet)
    with _scratch(store) as scratch, output.status("benchmark") as say:
        result = bench_host(scratch, quick=quick, progress=say)
    table = Table(
        "record", "direction", "GB/s", "ceiling GB/s", "ratio", "CPU s/GB", title="host path, verified"
    )
    for row in result["rows"]:
        table.add_row(
            f"{row['record_bytes'] >> 10} KiB",
            row["direction"],
            f"{row['gbps']:.2f}",
            f"{row['ceiling_gbps']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['cpu_s_per_gb']:.3f}",
        )
    output.show(table, result)


@app.command()
def lookup(
    store: Directory = None,
    pages: PageCount = 10_000_000,
    quick: Quick = False,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Time look-ups of 128 keys in a store of millions of pages (--quick: one million)."""
    output = Output(json, quiet)
    with _scratch(store) as scratch, output.status("filling the catalog"):
        result = bench_lookup(scratch, min(pages, QUICK_PAGES) if quick else pages)
    table = Table(
        "keys", "p50 us", "p99 us", title=f"look-up of {result['keys']} keys in {result['pages']:,} pages"
    )
    for kind in ("prefix", "scattered", "absent"):
        table.add_row(kind, f"{result[kind]['p50_us']:.0f}", f"{result[kind]['p99_us']:.0f}")
    output.show(table, result)


@app.command("open")
def open_(
    store: Directory = None,
    pages: PageCount = QUICK_PAGES,
    quick: Quick = False,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Time opening a store: after a clean shutdown, and when its catalog must be rebuilt."""
    output = Output(json, quiet)
    with _scratch(store) as scratch, output.status("making record tables"):
        result: dict[str, Any] = bench_open(scratch, min(pages, QUICK_PAGES) if quick else pages)
    table = Table("what", "value", title=f"opening a store of {result['pages']:,} pages")
    table.add_row("clean open", f"{result['open_ms']:.1f} ms")
    table.add_row("rebuild", f"{result['rebuild_s']:.2f} s")
    table.add_row("rebuild a million pages", f"{result['rebuild_s_per_million']:.2f} s")
    output.show(table, result)

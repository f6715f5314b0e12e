"""`gdsstore format`: make a store, and write all of its segments ahead of their first use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gdsstore.cli.options import JsonFile, Quiet, StoreDirs
from gdsstore.cli.output import Output
from gdsstore.config import Config
from gdsstore.directory import StoreDirectory, as_paths
from gdsstore.errors import ArgumentError
from gdsstore.sizes import format_size, parse_size
from gdsstore.store import Store

Capacity = Annotated[
    str | None,
    typer.Option("--capacity", metavar="SIZE", help="Disk that the store may use. Needed for a new store."),
]
SegmentBytes = Annotated[
    str | None,
    typer.Option(
        "--segment-bytes", metavar="SIZE", help="Size of a segment of a new store. None: from the capacity."
    ),
]


def format_(
    store: StoreDirs,
    capacity: Capacity = None,
    segment_bytes: SegmentBytes = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Make a store, and write all of its segments.

    A store also works without: it then grows segment by segment while pages are saved. On a store that is there this
    writes the segments that are missing up to the capacity, and changes that if another one is given; no page is
    touched.

    Exit code 1 if the drive had no room for all segments, 2 if there is no store afterwards.
    """
    output = Output(json, quiet)
    config = Config.load(capacity=capacity, segment_bytes=segment_bytes)
    new = _check(as_paths(store), config, segment_bytes)
    started = time.monotonic()
    with Store(store, config) as opened, output.progress("segments") as advance:
        before = sum(opened.stats()["segments"].values())
        unit = opened.segment_bytes
        have = opened.preallocate(progress=lambda done, total: advance(done * unit, total * unit))
        wanted = (
            opened.reclaimer.max_segments()
        )  # not before: catalog and heat file have grown, and count too
        seconds = time.monotonic() - started
        result: dict[str, Any] = {
            "store": str(opened.directory.root),
            "volumes": [str(volume.path) for volume in opened.volumes],
            "uuid": opened.uuid.hex(),
            "made": new,
            "capacity_bytes": opened.capacity_bytes,
            "segment_bytes": unit,
            "segments": have,
            "segments_wanted": wanted,
            "segments_written": have - before,
            "bytes_written": (have - before) * unit,
            "physical_bytes": opened.stats()["physical_bytes"],
            "seconds": seconds,
            "gbps": (have - before) * unit / seconds / 1e9,
        }
    output.show(_table(result), result)
    if have < wanted:
        output.warn("the drive has no room for all segments; the store works with those that are there")
        raise typer.Exit(1)


def _check(paths: list[Path], config: Config, segment_bytes: str | None) -> bool:
    """Whether the store is a new one. Raises ArgumentError where what was given does not suit it."""
    directory = StoreDirectory(paths[0])
    if not directory.exists():
        if config.capacity is None:
            raise ArgumentError("a new store needs a --capacity, such as 500GiB", path=str(paths[0]))
        return True
    have = directory.read().segment_bytes
    if segment_bytes is not None and parse_size(segment_bytes) not in (0, have):
        raise ArgumentError(
            f"this store has segments of {format_size(have)}, which stay; leave --segment-bytes out, or make a new store",
            path=str(paths[0]),
        )
    return False


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"store {result['store']}", show_header=False, title_justify="left")
    table.add_row("store", "made" if result["made"] else "was there")
    table.add_row("volumes", "\n".join(result["volumes"]))
    table.add_row("capacity", format_size(result["capacity_bytes"]))
    table.add_row(
        "segments",
        f"{result['segments']} of {result['segments_wanted']}, {format_size(result['segment_bytes'])} each",
    )
    written = f"{result['segments_written']} segments, {result['bytes_written'] / 1e9:.2f} GB"
    table.add_row("written", f"{written} in {result['seconds']:.1f} s ({result['gbps']:.2f} GB/s)")
    return table

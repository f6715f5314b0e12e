"""`gdsstore verify`: read everything that a store holds, and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from gdsstore.cli.options import JsonFile, Quiet, StoreDirs, existing, open_existing
from gdsstore.cli.output import Output
from gdsstore.config import Config
from gdsstore.engines.choose import make_engine
from gdsstore.errors import ArgumentError
from gdsstore.verify.offline import read_only_volumes, refuse_if_used, verify_offline
from gdsstore.verify.online import Progress, verify_online
from gdsstore.verify.payloads import PayloadReader
from gdsstore.verify.result import Damage, Verification

SHOWN = 50

Offline = Annotated[
    bool,
    typer.Option(
        "--offline", help="Read the segment files alone, without the catalog; the store must not be in use."
    ),
]
Repair = Annotated[
    bool, typer.Option("--repair", help="Drop what is damaged: such a page is a miss from then on.")
]


def verify(
    store: StoreDirs,
    offline: Offline = False,
    repair: Repair = False,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Check every checksum of a store: superblocks, record tables, all pages, and the catalog against them.

    The store may be in use. Exit code 1 if damage is found (with --repair: if some could not be repaired), 2 if the
    store could not be verified.
    """
    if offline and repair:
        raise ArgumentError("--repair needs the catalog: leave --offline out")
    output = Output(json, quiet)
    with output.progress("verify") as advance:
        result = _offline(store, advance) if offline else _online(store, repair, advance)
    output.show(_view(result), result.to_dict())
    if result.unrepaired if repair else result.damaged:
        raise typer.Exit(1)


def _online(paths: list[Path], repair: bool, progress: Progress) -> Verification:
    with open_existing(paths) as store:
        config = Config.load()
        engine = make_engine(
            config.engine, posix_threads=config.posix_threads, in_flight_ranges=config.in_flight_ranges
        )
        with PayloadReader(engine, store.volumes, store.segment_bytes, config) as reader:
            return verify_online(store, reader, repair=repair, progress=progress)


def _offline(paths: list[Path], progress: Progress) -> Verification:
    directory, found = existing(paths)
    refuse_if_used(directory.root)
    volumes = read_only_volumes(directory, found)
    config = Config.load()
    engine = make_engine(
        config.engine, posix_threads=config.posix_threads, in_flight_ranges=config.in_flight_ranges
    )
    with PayloadReader(engine, volumes, directory.read().segment_bytes, config) as reader:
        return verify_offline(directory, volumes, reader, progress=progress)


def _view(result: Verification) -> list[RenderableType]:
    table = Table(title="verify", show_header=False, title_justify="left")
    table.add_row("segments", f"{result.segments:,}")
    table.add_row("pages checked", f"{result.pages_checked:,}")
    table.add_row(
        "read", f"{result.bytes_checked / 1e9:.2f} GB in {result.seconds:.1f} s ({result.gbps:.2f} GB/s)"
    )
    if result.online:
        table.add_row("of these, not in the catalog", f"{result.leftovers:,}")
    if result.reclaimed:
        table.add_row("segments reclaimed meanwhile", f"{result.reclaimed:,}")
    if result.left_out:
        table.add_row("segments given up earlier", f"{len(result.left_out):,}")
    table.add_row("damage", f"{len(result.damaged):,}" if result.damaged else "none")
    lines: list[RenderableType] = [_line(each) for each in result.damaged[:SHOWN]]
    if len(result.damaged) > SHOWN:
        lines.append(f"... and {len(result.damaged) - SHOWN:,} more; --json has them all")
    lines += [
        f"{each.file}: given up earlier: {each.what}; delete it to get its space back"
        for each in result.left_out
    ]
    return [table, *lines]


def _line(damage: Damage) -> str:
    where = "" if damage.slot is None else f" slot {damage.slot}"
    key = "" if damage.key is None else f", key {damage.key}"
    pages = f", {damage.pages} pages" if damage.slot is None and damage.pages else ""
    return f"{damage.file}:{where} {damage.what}{key}{pages}{', dropped' if damage.repaired else ''}"

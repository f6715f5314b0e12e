"""`gdsstore stats`: a store's state in numbers, without looking into its segments."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from gdsstore.catalog.state import boot_id, read_state
from gdsstore.cli.options import JsonFile, Quiet, StoreDirs, existing, open_existing
from gdsstore.cli.output import Output


def stats(store: StoreDirs, json: JsonFile = None, quiet: Quiet = False) -> None:
    """Show a store's numbers: space, segments by state, catalog, and how it was closed last.

    Counters of what was saved and loaded live in the processes that did it; see `store.stats()` in docs/api.md.
    """
    output = Output(json, quiet)
    directory, _ = existing(store)
    state = read_state(directory.state)  # before opening changes it
    with output.status("opening"), open_existing(store) as opened:
        in_use = opened.opened.why == "other processes use it"
        result: dict[str, Any] = {
            "store": str(opened.directory.root),
            "uuid": opened.uuid.hex(),
            "volumes": [str(volume.path) for volume in opened.volumes],
            **opened.stats(),
            "state": {
                "clean": state.clean,
                "this_boot": state.boot_id == boot_id(),
                "capacity_bytes": state.capacity_bytes,
                "in_use": in_use,
            },
            "opened": opened.opened.why,
            "rebuilt_pages": None if opened.opened.recovered is None else opened.opened.recovered.pages,
        }
    output.show(_table(result), result)


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"store {result['store']}", show_header=False, title_justify="left")
    catalog, state = result["catalog"], result["state"]
    table.add_row("volumes", "\n".join(result["volumes"]))
    table.add_row("disk", f"{_gb(result['physical_bytes'])} of {_gb(result['capacity_bytes'])}")
    segments = ", ".join(f"{count:,} {name}" for name, count in result["segments"].items() if count)
    table.add_row("segments", f"{segments or 'none'}; {_mib(result['segment_bytes'])} each")
    table.add_row("pages", f"{catalog['pages']:,}")
    table.add_row(
        "catalog", f"{_mib(catalog['used_bytes'])}, depth {catalog['depth']}, {catalog['readers']} readers"
    )
    closed = "cleanly" if state["clean"] else "in use now" if state["in_use"] else "not cleanly"
    table.add_row("closed last", closed if state["this_boot"] else f"{closed}, before the machine was booted")
    table.add_row("catalog used", result["opened"])
    return table


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"

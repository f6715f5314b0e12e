"""The node daemon: how long a look-up through it takes, and what loads lose while its socket and its HTTP side are busy.

    python bench/daemon.py [--json FILE] [--quick] [--directory DIR]

bench/README.md says how it measures.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from common import Directory, Tiny, measuring, one_sentence, start
from daemon_parts.run import FULL, QUICK, TINY, run
from rich.table import Table

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output


def tables(result: dict[str, Any]) -> Table:
    lookups, parameters = result["lookups"], result["parameters"]
    view = Table(
        *(
            "loads from",
            "alone GB/s",
            "burdened GB/s",
            "ratio",
            "look-up p50",
            "p99",
            "HTTP p50",
            "p99",
            "meets",
        ),
        title=f"look-ups of {parameters['lookup_keys']} keys through the daemon: p50 {_us(lookups['p50_us'])}, p99 "
        f"{_us(lookups['p99_us'])}; then loads, with {parameters['lookups_per_s']} look-ups and {parameters['http_per_s']} HTTP "
        "requests a second beside them",
    )
    for row in result["rows"]:
        times = [_us(row[what][which]) for what in ("lookups", "http") for which in ("p50_us", "p99_us")]
        speeds = f"{row['alone_gbps']:.2f}", f"{row['burdened_gbps']:.2f}", f"{row['ratio']:.2f}"
        view.add_row(row["source"], *speeds, *times, "yes" if row["meets"] else "NO")
    return view


def _us(microseconds: float | None) -> str:
    return "none" if microseconds is None else f"{microseconds:,.0f} us"


def main(
    json: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer pages, look-ups and rounds.")] = False,
    directory: Directory = None,
    quiet: Quiet = False,
    tiny: Tiny = False,
) -> None:
    """Look up through the node daemon, and load pages while others keep it busy and while they do not, in turn."""
    with one_sentence():
        output = Output(json, quiet)
        with measuring("daemon", output, directory) as (scratch, say):
            result = run(scratch / "store", TINY if tiny else QUICK if quick else FULL, say)
        output.show(tables(result), result)


if __name__ == "__main__":
    start(main)

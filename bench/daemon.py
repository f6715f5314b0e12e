"""The node daemon: how long a look-up through it takes, and what loads lose while its socket and its HTTP side are busy.

    python bench/daemon.py [--json FILE] [--quick] [--directory DIR]

bench/README.md says how it measures.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import typer  # noqa: E402
from daemon_parts.run import FULL, QUICK, TINY, run  # noqa: E402
from rich.table import Table  # noqa: E402

from gdsstore.cli.main import CANNOT_RUN  # noqa: E402
from gdsstore.cli.options import JsonFile, Quiet  # noqa: E402
from gdsstore.cli.output import Output, logs_on_stderr  # noqa: E402
from gdsstore.errors import GdsStoreError  # noqa: E402


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


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".daemon-bench-", dir=directory) as name:
        yield Path(name) / "store"


def main(
    json: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer pages, look-ups and rounds.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="Where to work, in a new folder. Default: here.")
    ] = None,
    quiet: Quiet = False,
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True)] = False,  # numbers without a meaning
) -> None:
    """Look up through the node daemon, and load pages while others keep it busy and while they do not, in turn."""
    try:
        output = Output(json, quiet)
        with (
            output.status("daemon") as say,
            logs_on_stderr(),
            _scratch(directory or Path.cwd()) as scratch,
        ):
            result = run(scratch, TINY if tiny else QUICK if quick else FULL, say)
        output.show(tables(result), result)
    except GdsStoreError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(CANNOT_RUN) from None


if __name__ == "__main__":
    typer.run(main)

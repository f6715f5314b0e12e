"""The direct path between drive and GPU beside a bounce through host memory, on this machine: a report with plots, and JSON.

    python bench/gds_vs_bounce.py [--quick] [--out DIR] [--path DIR] [--json FILE]

bench/README.md says how to read it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import typer  # noqa: E402
from gds_parts import run, sizes  # noqa: E402
from gds_parts.gpu import Gpu, has_simulator, real_gpu, simulated_gpu, start_again_simulated  # noqa: E402
from gds_parts.plots import need_matplotlib  # noqa: E402
from gds_parts.report import tables, write_report  # noqa: E402

from gdsstore.cli.main import CANNOT_RUN  # noqa: E402
from gdsstore.cli.options import JsonFile, Quiet  # noqa: E402
from gdsstore.cli.output import Output, logs_on_stderr  # noqa: E402
from gdsstore.errors import GdsStoreError, from_os_error  # noqa: E402

Quick = Annotated[bool, typer.Option("--quick", help="Fewer cells and smaller turns: under 3 minutes.")]
Out = Annotated[Path, typer.Option(help="Where report.html, the PNG files and gds_vs_bounce.json go.")]
Where = Annotated[
    Path | None,
    typer.Option(
        "--path",
        help="A directory on the drive to measure; the bench works in a new folder in it. Default: --out.",
    ),
]
Tiny = Annotated[bool, typer.Option("--tiny", hidden=True)]  # for the tests: numbers without a meaning
Simulated = Annotated[bool, typer.Option("--simulated", hidden=True)]  # how it starts itself again


def main(
    quick: Quick = False,
    out: Out = Path("out"),
    path: Where = None,
    json: JsonFile = None,
    quiet: Quiet = False,
    tiny: Tiny = False,
    simulated: Simulated = False,
) -> None:
    """Read and write records of 16 KiB to 16 MiB with 1 to 64 in flight, by cuFile's direct path, by bounces through host
    memory, and into host memory alone, in turn; write the numbers and a report that marks where the direct path loses."""
    try:
        output = Output(json, quiet)
        need_matplotlib()  # now, not after an hour
        gpu = _gpu(simulated)
        out.mkdir(parents=True, exist_ok=True)
        with output.status("gds_vs_bounce") as say, logs_on_stderr(), _scratch(path or out) as scratch:
            chosen = sizes.TINY if tiny else sizes.QUICK if quick else sizes.FULL
            measured = run.run(scratch, chosen, gpu, say)
            say("the report")
            write_report(out, measured)
        output.show(tables(measured, out), measured.to_dict())
    except GdsStoreError as error:
        _fail(" ".join(str(error).split()))
    except OSError as error:
        _fail(" ".join(str(from_os_error(error, "it failed", GdsStoreError)).split()))


def _gpu(simulated: bool) -> Gpu:
    if simulated:
        return simulated_gpu()
    gpu = real_gpu()
    if gpu.kind == "none" and has_simulator(ROOT):
        start_again_simulated([str(Path(__file__).resolve()), *sys.argv[1:], "--simulated"])
    return gpu


@contextmanager
def _scratch(where: Path) -> Iterator[Path]:
    """A new folder; what the bench writes to measure is removed with it."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gds-bench-", dir=where) as scratch:
        yield Path(scratch)


def _fail(text: str) -> None:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(CANNOT_RUN)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()

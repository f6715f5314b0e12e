"""Layer-wise loads beside a simulated forward: whether the two together take no longer than the slower one of them.

    python bench/overlap.py [--json FILE] [--quick] [--directory DIR]

bench/README.md says how it measures.
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
from overlap_parts import run, sizes  # noqa: E402
from overlap_parts.report import tables  # noqa: E402

from gdsstore.cli.main import CANNOT_RUN  # noqa: E402
from gdsstore.cli.options import JsonFile, Quiet  # noqa: E402
from gdsstore.cli.output import STDOUT, Output, logs_on_stderr  # noqa: E402
from gdsstore.errors import GdsStoreError, from_os_error  # noqa: E402

Directory = Annotated[
    Path | None,
    typer.Option(
        help="A directory on the drive to measure; the bench works in a new folder in it. Default: here."
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="64 and 256 pages only: under a minute.")]
Tiny = Annotated[bool, typer.Option("--tiny", hidden=True)]  # for the tests: numbers without a meaning
Device = Annotated[Path | None, typer.Option("--device", hidden=True)]  # how it starts itself again
Simulated = Annotated[bool, typer.Option("--simulated", hidden=True)]


def main(
    json: JsonFile = None,
    quick: Quick = False,
    directory: Directory = None,
    quiet: Quiet = False,
    tiny: Tiny = False,
    device: Device = None,
    simulated: Simulated = False,
) -> None:
    """Load 64 to 2048 pages layer by layer beside a forward that takes 0.25, 1 and 4 times as long as the I/O, into host memory and
    into GPU memory, and compare with the I/O alone and the forward alone."""
    chosen = sizes.TINY if tiny else sizes.QUICK if quick else sizes.FULL
    size = ["--tiny"] if tiny else ["--quick"] if quick else []
    try:
        if device is not None:
            output = Output(STDOUT, True)
            with output.status("overlap") as say, logs_on_stderr():
                found = run.run_device(device, chosen, simulated, say)
            output.show([], found)
            return
        output = Output(json, quiet)
        with (
            output.status("overlap") as say,
            logs_on_stderr(),
            _scratch(directory or Path.cwd()) as scratch,
        ):
            result = run.run(scratch, chosen, [str(Path(__file__).resolve()), *size], say, ROOT)
        output.show(tables(result), result)
    except GdsStoreError as error:
        _fail(" ".join(str(error).split()))
    except OSError as error:
        _fail(" ".join(str(from_os_error(error, "it failed", GdsStoreError)).split()))


@contextmanager
def _scratch(where: Path) -> Iterator[Path]:
    """A new folder; everything that the bench writes is removed with it."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".overlap-bench-", dir=where) as scratch:
        yield Path(scratch)


def _fail(text: str) -> None:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(CANNOT_RUN)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()

"""The direct linker: restores from this machine's drive beside the raw ceiling, beside a forward, and beside HiCache.

    python bench/linker.py [--json FILE] [--quick] [--directory DIR]

Runs in the environment of scripts/setup_sglang_venv.sh; bench/README.md says how it measures.
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
from hicache_parts.environment import has_sglang, prepare_sglang  # noqa: E402
from linker_parts import sizes  # noqa: E402
from linker_parts.report import tables  # noqa: E402

from gdsstore.cli.main import CANNOT_RUN  # noqa: E402
from gdsstore.cli.options import JsonFile, Quiet  # noqa: E402
from gdsstore.cli.output import Output, logs_on_stderr  # noqa: E402
from gdsstore.errors import GdsStoreError  # noqa: E402

Directory = Annotated[
    Path | None,
    typer.Option(
        help="A directory on the drive to measure; the bench works in a new folder in it. Default: here."
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="64 and 256 pages only: about a minute.")]
Tiny = Annotated[bool, typer.Option("--tiny", hidden=True)]  # for the tests: numbers without a meaning


def main(
    json: JsonFile = None,
    quick: Quick = False,
    directory: Directory = None,
    quiet: Quiet = False,
    tiny: Tiny = False,
) -> None:
    """Restore 64 to 2048 pages into a real SGLang device pool in host memory with the linker, with raw NIXL io_uring, and beside a
    forward; and load as many with HiCache's backends."""
    if not has_sglang():
        _fail(
            "this bench runs SGLang's own code, and sglang is not installed; see scripts/setup_sglang_venv.sh"
        )
    try:
        output = Output(json, quiet)
        with output.status("linker") as say, logs_on_stderr(), _scratch(directory or Path.cwd()) as scratch:
            say("importing SGLang")
            prepare_sglang(ROOT)
            from linker_parts import run

            chosen = sizes.TINY if tiny else sizes.QUICK if quick else sizes.FULL
            result = run.run(scratch, chosen, say)
        output.show(tables(result), result)
    except GdsStoreError as error:
        _fail(" ".join(str(error).split()))


@contextmanager
def _scratch(where: Path) -> Iterator[Path]:
    """A new folder; everything that the bench writes is removed with it."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".linker-bench-", dir=where) as scratch:
        yield Path(scratch)


def _fail(text: str) -> None:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(CANNOT_RUN)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()

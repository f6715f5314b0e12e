"""What every bench's command line has: its options, its scratch folder, and errors as one sentence."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import typer  # noqa: E402

from gdsstore.cli.main import CANNOT_RUN  # noqa: E402
from gdsstore.cli.output import Output, logs_on_stderr  # noqa: E402
from gdsstore.errors import GdsStoreError, from_os_error  # noqa: E402

Directory = Annotated[
    Path | None,
    typer.Option(
        help="A directory on the drive to measure; the bench works in a new folder in it. Default: here."
    ),
]
Tiny = Annotated[bool, typer.Option("--tiny", hidden=True)]  # for the tests: numbers without a meaning


@contextmanager
def one_sentence() -> Iterator[None]:
    """Errors of the store and the system end the program with a sentence instead of a traceback."""
    try:
        yield
    except GdsStoreError as error:
        fail(str(error))
    except OSError as error:
        fail(str(from_os_error(error, "it failed", GdsStoreError)))


def fail(text: str) -> None:
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    raise typer.Exit(CANNOT_RUN)


@contextmanager
def measuring(
    name: str, output: Output, directory: Path | None
) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A new folder in `directory`, which goes with all that is in it, and what tells the user how far the bench is."""
    where = directory or Path.cwd()
    where.mkdir(parents=True, exist_ok=True)
    with (
        output.status(name) as say,
        logs_on_stderr(),
        tempfile.TemporaryDirectory(prefix=f".{name}-bench-", dir=where) as scratch,
    ):
        yield Path(scratch), say


def start(main: Callable[..., Any]) -> None:
    """Run a bench's `main` as the program."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()

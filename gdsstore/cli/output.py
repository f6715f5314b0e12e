"""Where a command's words go: the result to standard output or a JSON file, everything else to standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gdsstore.errors import ArgumentError, from_os_error

STDOUT = "-"
PIPE_WIDTH = 200  # columns of a table that goes to a file or a pipe: paths must stay whole


class Output:
    """One command's output. `json_file`: None, a path, or "-" for standard output with nothing else on it.

    Raises ArgumentError where the file's folder is not there.
    """

    def __init__(self, json_file: str | None, quiet: bool) -> None:
        self._json_file, self._quiet = json_file, quiet
        self.messages = Console(stderr=True)
        if json_file not in (None, STDOUT) and not Path(str(json_file)).absolute().parent.is_dir():
            raise ArgumentError(
                "the folder of the JSON file is not there", path=json_file
            )  # now, not after an hour
        if quiet:
            logging.getLogger("gdsstore").setLevel(logging.CRITICAL)

    @contextlib.contextmanager
    def status(self, what: str) -> Iterator[Callable[[str], None]]:
        """A spinner for the length of a `with`; call what it yields to say what is being done now."""
        with contextlib.ExitStack() as stack:
            say: Callable[[str], None] = lambda detail: None  # noqa: E731
            if self._shows_progress:
                status = stack.enter_context(self.messages.status(what))
                say = lambda detail: status.update(f"{what}: {detail}")  # noqa: E731
            stack.enter_context(_only_ours_on_stdout())
            yield say

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar for the length of a `with`; call what it yields with (bytes done, bytes in all)."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with (
            Progress(
                *columns, console=self.messages, transient=True, disable=not self._shows_progress
            ) as bar,
            _only_ours_on_stdout(),
        ):
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @contextlib.contextmanager
    def counted(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """As `progress`, for things that are counted; call what it yields with how many are done."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with (
            Progress(
                *columns, console=self.messages, transient=True, disable=not self._shows_progress
            ) as bar,
            _only_ours_on_stdout(),
        ):
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)

    def show(self, view: RenderableType | list[RenderableType], result: dict[str, Any]) -> None:
        """The command's result: as JSON where that was asked for, and as tables unless they are not wanted.

        Raises ArgumentError where the JSON file cannot be written.
        """
        if self._json_file == STDOUT:
            sys.stdout.write(_text(result))
            sys.stdout.flush()
            return
        if self._json_file is not None:
            try:
                Path(self._json_file).write_text(_text(result))
            except OSError as error:
                raise from_os_error(error, "cannot write the result", ArgumentError) from error
        if not self._quiet:
            console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
            for part in view if isinstance(view, list) else [view]:
                # Text as it is: a path with brackets is not markup, and a line that a program may read is not folded.
                console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))

    def warn(self, text: str) -> None:
        """One line on standard error, unless the command is to be quiet."""
        if not self._quiet:
            self.messages.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    @property
    def _shows_progress(self) -> bool:
        return not self._quiet and self.messages.is_terminal


def _text(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=1, allow_nan=False) + "\n"


@contextlib.contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Show the library's warnings on standard error for the length of a `with`."""
    logger = logging.getLogger("gdsstore")
    level = logger.level
    handler = RichHandler(
        logging.WARNING,
        Console(stderr=True),
        show_time=False,
        show_path=False,
        markup=False,
        highlighter=None,
    )
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def _only_ours_on_stdout() -> Iterator[None]:
    """Send to standard error what C libraries print on their own: a result on standard output must stand alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)

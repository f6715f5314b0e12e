"""`gdsstore top`: the daemon's status in the terminal, again and again."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from gdsstore.cli.options import JsonFile
from gdsstore.cli.output import Output
from gdsstore.cli.top_frame import WINDOW_S, frame
from gdsstore.cli.top_sources import Ask, from_store, from_url
from gdsstore.errors import ArgumentError, GdsStoreError

Stores = Annotated[
    list[Path],
    typer.Option("--store", help="Directory of the store; without a daemon all of them, as for the others."),
]
Url = Annotated[
    str | None, typer.Option("--url", help="Ask a daemon over HTTP instead: http://127.0.0.1:9470.")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token that a daemon at --url asks for.")
]
Once = Annotated[bool, typer.Option("--once", help="Show it once, and end.")]
Every = Annotated[float, typer.Option("--every", min=0.5, max=3600, help="Seconds between two looks.")]


def top(
    store: Stores = [],  # noqa: B006  typer makes a new one for each call
    url: Url = None,
    token_file: TokenFile = None,
    once: Once = False,
    every: Every = 2.0,
    json: JsonFile = None,
) -> None:
    """Show what the node daemon does now: throughput, hits, queues, drives, namespaces, errors. Ctrl-C ends it.

    Without a daemon it shows what the store's files tell. Where the output is no terminal, it shows that once.
    """
    if bool(store) == bool(url):
        raise ArgumentError("give either --store or --url")
    if token_file is not None and url is None:
        raise ArgumentError("--token-file goes with --url; the socket of a store needs no token")
    with from_store(store) if url is None else from_url(url, token_file) as ask:
        if once or json is not None or not sys.stdout.isatty():
            document = ask()
            Output(json, quiet=False).show(frame(document, []), document)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                _watch(ask, every)


def _watch(ask: Ask, every_s: float) -> None:
    older: deque[dict[str, Any]] = deque()
    latest, came = ask(), time.monotonic()
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        problem: str | None = None
        while True:
            width, height = console.size
            live.update(frame(latest, older, width=width, height=height, problem=problem), refresh=True)
            time.sleep(every_s)
            try:
                found, problem = ask(), None
            except GdsStoreError as error:
                problem = f"{error} (shown: {time.monotonic() - came:.0f} s old)"
                continue
            if found["clock_s"] != latest["clock_s"]:
                older.append(latest)
                latest, came = found, time.monotonic()
            while older and latest["clock_s"] - older[0]["clock_s"] > 2 * WINDOW_S:
                older.popleft()

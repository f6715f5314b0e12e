"""`gdsstore serve`: the node daemon of a store."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gdsstore.cli.options import StoreDirs, existing
from gdsstore.config import Config
from gdsstore.errors import ConfigError, from_os_error
from gdsstore.sizes import parse_size

log = logging.getLogger("gdsstore.service")

DEFAULT_HTTP = "127.0.0.1:9470"
MAX_TOKEN_BYTES = 4096
LEAST_TOKEN = 16  # characters


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


HostCache = Annotated[
    str | None,
    typer.Option(
        "--host-cache",
        metavar="SIZE",
        help="Host memory for pages, which the processes of this node share. Default: the setting host_cache.",
    ),
]
Http = Annotated[
    str, typer.Option("--http", metavar="HOST:PORT", help="Where to answer HTTP. Port 0: any free one.")
]
NoHttp = Annotated[bool, typer.Option("--no-http", help="Do not answer HTTP.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="A file that only its owner can read, with the token that HTTP callers must bring.",
    ),
]
AllowHosts = Annotated[
    list[str],
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="A name under which HTTP callers reach the daemon, through a tunnel or a service, say. Once for each.",
    ),
]
ScrubRate = Annotated[
    str,
    typer.Option(
        "--scrub-rate", metavar="SIZE", help="Bytes a second to read and check in idle time. 0: none."
    ),
]
DrainS = Annotated[
    float, typer.Option("--drain-s", min=0, max=3600, help="Seconds at the end for what is under way.")
]
Level = Annotated[LogLevel, typer.Option("--log-level", help="What to log to standard error.")]


def serve(
    store: StoreDirs,
    host_cache: HostCache = None,
    http: Http = DEFAULT_HTTP,
    no_http: NoHttp = False,
    token_file: TokenFile = None,
    allow_host: AllowHosts = [],  # noqa: B006  typer makes a new one for each call
    scrub_rate: ScrubRate = "32MiB",
    drain_s: DrainS = 10.0,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Serve a store to the processes of this node: shared host memory, prefetches, upkeep, scrub, metrics and status.

    Processes that have the store open find the daemon by themselves, and go on without it where there is none. It runs until
    SIGTERM or SIGINT. Exit code 1 if what was under way did not end within --drain-s.
    """
    from gdsstore.service.daemon import DaemonOptions, run_daemon
    from gdsstore.service.web import parse_address

    _, paths = existing(store)
    token = None if token_file is None else _token(token_file)
    address = None if no_http else parse_address(http, token, allow_host)
    options = DaemonOptions(address, parse_size(scrub_rate), drain_s)
    with _logging(log_level):
        ended = run_daemon(paths, _config(host_cache), options)
    if not ended:
        raise typer.Exit(1)


def _config(host_cache: str | None) -> Config:
    """The daemon's. It needs no key: sealed pages are kept up and scrubbed as they are. Raises ConfigError."""
    given = Config.load(host_cache=host_cache, daemon="off")
    if not given.encrypts:
        return dataclasses.replace(given, share_host_cache=True)
    if host_cache is not None and given.host_cache:
        raise ConfigError(
            "--host-cache does not go with encryption: other processes would read the pages in the clear; leave it out"
        )
    log.info("the pages are encrypted, so no host memory is shared")
    return dataclasses.replace(given, encryption_key=None, encryption_key_file=None, host_cache=0)


def _token(path: Path) -> str:
    """The content of a file that nobody else can read. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                raise ConfigError("others can read the token; chmod 600 the file", path=str(path))
            content = os.read(fd, MAX_TOKEN_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, "cannot read the token", ConfigError) from error
    token = content.decode("ascii", "replace").strip()
    if not (token.isascii() and token.isprintable() and " " not in token and len(token) >= LEAST_TOKEN):
        raise ConfigError(f"a token is one word of at least {LEAST_TOKEN} ASCII characters", path=str(path))
    return token


@contextlib.contextmanager
def _logging(level: LogLevel) -> Iterator[None]:
    """The library's messages as plain lines on standard error, in the place of those that other commands show."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("gdsstore", "uvicorn")]
    before = [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, was, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(was)

"""The options that commands have in common, and what they mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gdsstore.config import Config, EngineName
from gdsstore.directory import StoreDirectory, as_paths
from gdsstore.errors import StoreError
from gdsstore.store import Store

StoreDirs: TypeAlias = Annotated[
    list[Path],
    typer.Option(
        "--store",
        help="Directory of the store; several times for a store on several volumes, the first one first.",
    ),
]
JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON; - is standard output, with nothing else there.",
    ),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="No progress, no tables and no warnings.")]


def existing(paths: list[Path]) -> tuple[StoreDirectory, list[Path]]:
    """The directory of a store that is there, and the volumes' absolute paths. Makes nothing. Raises StoreError if none is."""
    found = as_paths(paths)
    directory = StoreDirectory(found[0])
    if not directory.exists():
        raise StoreError("there is no store here; make one with `gdsstore format`", path=str(found[0]))
    return directory, found


def tool_config() -> Config:
    """The user's config for a tool that looks at a store: it changes no capacity, does no upkeep and needs no engine."""
    return replace(Config.load(), capacity=None, segment_bytes=0, maintain=False, engine=EngineName.AUTO)


def open_existing(paths: list[Path]) -> Store:
    """Open a store as one more user. Raises StoreError where there is none, and what `gdsstore.open` raises."""
    _, found = existing(paths)
    return Store(found, tool_config())

"""All facts of a machine at once. Never raises: what fails becomes a note."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gdsstore.probe.cufile import cufile, nvidia_fs
from gdsstore.probe.facts import (
    Container,
    CuFile,
    Environment,
    Kernel,
    MachineFacts,
    Nvidia,
    NvidiaFs,
    Packages,
    Storage,
)
from gdsstore.probe.gpu import nvidia
from gdsstore.probe.kernel import kernel
from gdsstore.probe.software import container, environment, packages
from gdsstore.probe.storage import storage
from gdsstore.probe.tree import LIVE, Tree

T = TypeVar("T")


def gather(
    path: str | Path,
    *,
    root: Path = LIVE,
    environ: Mapping[str, str] | None = None,
    search_path: tuple[str, ...] | None = None,
) -> MachineFacts:
    """The facts of the machine at `root` for a store in `path`, an absolute path on that machine.

    Where `root` is this machine, NVML and cuFile's driver are asked as well (at most 30 seconds, and only where there is a
    GPU), io_uring is tried, and one block is written to `path`. `search_path`: where Python packages are looked for.
    """
    tree = Tree(root)
    variables = os.environ if environ is None else environ
    folders = search_path if search_path is not None else None if tree.live else ()
    notes: list[str] = []

    def safely(collect: Callable[[], T], nothing: T) -> T:
        # A doctor that falls ill of what it looks at helps nobody: anything a strange /proc or driver makes us
        # stumble over is a note, and the other facts still count.
        try:
            return collect()
        except Exception as error:
            notes.append(f"{type(nothing).__name__}: {type(error).__name__}: {error}")
            return nothing

    found = safely(lambda: nvidia(tree), Nvidia())
    ask_driver = tree.live and bool(found.gpus)
    facts = MachineFacts(
        kernel=safely(lambda: kernel(tree), Kernel()),
        nvidia=found,
        cufile=safely(lambda: cufile(tree, variables, ask_driver=ask_driver), CuFile()),
        nvidia_fs=safely(lambda: nvidia_fs(tree), NvidiaFs()),
        packages=safely(lambda: packages(folders, variables), Packages()),
        environment=safely(lambda: environment(variables), Environment()),
        container=safely(lambda: container(tree, variables), Container()),
        storage=safely(lambda: storage(tree, str(path)), Storage(path=str(path))),
    )
    return replace(facts, notes=(*dict.fromkeys(tree.notes), *notes))

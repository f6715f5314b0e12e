"""The processes of a running server, seen from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from server import ServerClient, running_server

END_TIMEOUT_S = 30.0


def processes(server: ServerClient) -> list[psutil.Process]:
    """The leader of the server's process group, then all below it."""
    port = ["--port", str(server.port)]
    for child in psutil.Process().children():
        arguments = child.cmdline()
        if any(arguments[at : at + 2] == port for at in range(len(arguments))):
            return [child, *child.children(recursive=True)]
    raise AssertionError(f"no process of the server on port {server.port}")


@contextmanager
def throwaway_server(**arguments: Any) -> Iterator[ServerClient]:
    """`server.running_server` for servers whose end is not under test: it takes them 5 s to stop in order."""
    with running_server(**arguments) as server:
        yield server
        kill(server)


def kill(server: ServerClient) -> None:
    """kill -9 of the whole process group; waits until all of it is gone."""
    group = processes(server)
    shared = set().union(*(holds(process, Path("/dev/shm")) for process in group))
    os.killpg(group[0].pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(group, END_TIMEOUT_S)
    assert not alive
    for path in shared:  # nobody is left who would remove it
        Path(path).unlink(missing_ok=True)


def users(server: ServerClient, folder: Path) -> list[psutil.Process]:
    """Those of the server's processes that have a file below `folder` open or mapped."""
    return [process for process in processes(server) if holds(process, folder)]


def holds(process: psutil.Process, folder: Path) -> set[str]:
    """The files below `folder` that a process has open or mapped."""
    root = f"{folder.resolve()}/"
    found = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            found.add(os.readlink(link))
        except FileNotFoundError:
            continue  # closed meanwhile
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        found.add(line.split(maxsplit=5)[-1])
    return {path for path in found if path.startswith(root)}


def settled_threads(process: psutil.Process, at_most: int, timeout_s: float = 10.0) -> int:
    """How many threads a process has, as soon as they are no more than `at_most`, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while process.num_threads() > at_most and time.monotonic() < deadline:
        time.sleep(0.1)
    return process.num_threads()

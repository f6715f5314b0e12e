"""The daemon that is measured, and the process that burdens it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gdsstore.errors import GdsStoreError

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 60.0


@contextlib.contextmanager
def daemon(store: Path, host_cache: int) -> Iterator[str]:
    """A ready daemon, and where it answers HTTP. Raises GdsStoreError where it does not start."""
    command = [sys.executable, "-m", "gdsstore.cli.main", "serve", "--store", str(store), "--scrub-rate", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host-cache", str(host_cache), "--http", "127.0.0.1:0"],
            cwd=ROOT,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            yield _address(process, log.fileno())
            process.terminate()
            process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: int) -> str:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        text = os.pread(log, 1 << 16, 0).decode(errors="replace")
        found = re.search(r"serving .*, http://(\S+)/", text)
        if found is not None:
            return found[1]
        time.sleep(0.02)
    raise GdsStoreError("the daemon did not start", said=os.pread(log, 1 << 16, 0).decode(errors="replace"))


class Burden:
    """See burden.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def go(self) -> None:
        self._tell("go")

    def rest(self) -> tuple[list[float], list[float]]:
        """How long the look-ups and the HTTP requests took, in seconds."""
        self._tell("rest")
        assert self._process.stdout is not None
        lookups, http = json.loads(self._process.stdout.readline())
        return lookups, http


@contextlib.contextmanager
def burden(store: Path, address: str, digest: bytes, per_s: tuple[int, int]) -> Iterator[Burden]:
    """`per_s`: look-ups and HTTP requests a second."""
    script = Path(__file__).with_name("burden.py")
    arguments = [str(store), address, digest.hex(), *map(str, per_s)]
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Burden(process)
    finally:
        process.communicate()

"""A process of its own for calls that may never return: listened to, and ended in time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CUFILE_LOG = "cufile.log"
ERROR = " ERROR "  # as cuFile marks a line
KILLED_S = 2.0  # how long a killed process is waited for: one that hangs in the kernel stays


@dataclass(frozen=True, slots=True)
class Said:
    """`exit_code`: negative for a signal, None where the process did not end in time. `refused`: cuFile's last error in its log."""

    lines: tuple[str, ...]
    exit_code: int | None
    refused: str | None = None

    @property
    def answer(self) -> dict[str, Any] | None:
        """The JSON object in the last line; None where there is none."""
        try:
            found = json.loads(self.lines[-1])
        except (IndexError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def ask(arguments: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> Said:
    """Run Python with `arguments`, at most `timeout_s` seconds, and hear what it prints. Raises OSError where it cannot start.

    It runs in a folder that goes afterwards: cuFile writes cufile.log to where it runs. Its output goes to a file and not to
    a pipe: what was said before a hang can be read, and nothing waits for a process that cannot be killed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gdsstore-doctor-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as output,
    ):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
        exit_code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout_s)
        finally:
            if exit_code is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(KILLED_S)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
        return Said(tuple(lines), exit_code, _last_error(Path(folder, CUFILE_LOG)))


def _last_error(log: Path) -> str | None:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(ERROR)[2].strip() for line in reversed(lines) if ERROR in line), None)

"""Starting workers through a zygote, killing them at a chosen moment, and learning how they ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.journal import phases

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0  # far beyond what anything here takes
POLL_S = 0.002


class Zygote:
    """The parent's end; see zygote.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote died"
        return dict(json.loads(line))

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def spawn(self, kind: str, spec: dict[str, Any], stderr: Path) -> Worker:
        return Worker(self, self._ask(kind=kind, spawn=spec, stderr=str(stderr))["pid"], stderr)

    def reap(self, pid: int) -> int | None:
        code: int | None = self._ask(reap=pid)["code"]
        return code

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


@dataclass(slots=True)
class Worker:
    """One forked process. It is not reaped before its end was asked for, so its pid stays its own."""

    zygote: Zygote
    pid: int
    stderr: Path
    code: int | None = None

    def ended(self) -> bool:
        if self.code is None:
            self.code = self.zygote.reap(self.pid)
        return self.code is not None

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        end = time.monotonic() + PATIENCE_S
        while not self.ended():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"a worker hung: {self.complaint()}")
            time.sleep(POLL_S)
        assert self.code is not None
        return self.code

    def wait_for_phase(self, journal: Path, word: str, count: int = 1) -> bool:
        """Whether the worker came to a phase for the `count`-th time; False where it ended before."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            ended = self.ended()  # asked first: what it wrote before it ended is then seen
            if phases(journal, self.pid).count(word) >= count:
                return True
            if ended:
                return False
            time.sleep(POLL_S)
        self.kill()
        raise AssertionError(f"a worker hung before {word!r}: {self.complaint()}")

    def complaint(self) -> str:
        """Why it may have ended, for a message."""
        tail = self.stderr.read_text(errors="replace")[-3000:] if self.stderr.exists() else ""
        return f"exit code {self.code}\n{tail}"

"""The worker processes of a replay: started, listened to, and ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gdsstore import errors
from gdsstore.errors import DeadlineError, GdsStoreError, StoreError
from gdsstore.replay.plan import ReplayPlan
from gdsstore.replay.worker import WorkerResult

SILENCE_S = 300.0  # a worker tells of each call to the store, and these have deadlines of their own
_EXIT_S = 30.0


def run_processes(plan: ReplayPlan, progress: Callable[[int], None]) -> list[WorkerResult]:
    """Run the plan's workers; `progress` is told how many requests are done. Their results, in order.

    Raises the first error that a worker ends with, DeadlineError for one that hangs; the others are stopped.
    """
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_WorkerProcess(plan, number)) for number in range(plan.processes)]
        selector = stack.enter_context(selectors.DefaultSelector())
        for worker in workers:
            selector.register(worker.channel, selectors.EVENT_READ, worker)
        while selector.get_map():
            now_s = time.monotonic()
            for key, _ in selector.select(timeout=1.0):
                if not key.data.read():
                    selector.unregister(key.fileobj)
            for key in selector.get_map().values():
                if now_s - key.data.heard_s > SILENCE_S:
                    raise DeadlineError(
                        "a replay worker is silent", worker=key.data.number, seconds=SILENCE_S
                    )
            progress(sum(worker.done for worker in workers))
        return [worker.result() for worker in workers]


class _WorkerProcess:
    """A child process that runs one worker. On leaving the `with` it has ended, one way or the other."""

    def __init__(self, plan: ReplayPlan, number: int) -> None:
        self.number = number
        self.done = 0
        self.heard_s = time.monotonic()
        self._rest = b""
        self._answer: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gdsstore.replay.worker", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.channel = self._process.stdout
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(plan.to_json().encode())

    def read(self) -> bool:
        """Take in what has arrived; whether more may come. Call only when the channel is readable."""
        arrived = self.channel.read(1 << 20)
        self.heard_s = time.monotonic()
        *lines, self._rest = (self._rest + (arrived or b"")).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "done" in message:
                self.done = message["done"]
            else:
                self._answer = message
        return bool(arrived)

    def check_alive(self) -> None:
        """Raises DeadlineError if the worker has neither ended nor told anything for a long time."""
        if not self._answer and time.monotonic() - self.heard_s > SILENCE_S:
            raise DeadlineError("a replay worker is silent", worker=self.number, seconds=SILENCE_S)

    def result(self) -> WorkerResult:
        """What the worker found. Raises the error that ended it."""
        if "result" in self._answer:
            return WorkerResult.from_dict(self._answer["result"])
        if "error" in self._answer:
            kind = getattr(errors, self._answer["kind"], GdsStoreError)
            raise _revived(kind, self._answer["error"])
        code = self._process.wait(_EXIT_S)
        raise StoreError("a replay worker ended without an answer", worker=self.number, exit_code=code)

    def __enter__(self) -> _WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._answer:
            self._process.terminate()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_EXIT_S)
        self.channel.close()


def _revived(kind: type[GdsStoreError], message: str) -> GdsStoreError:
    """An error of a worker, of its kind, whatever that kind's own constructor asks for."""
    error = kind.__new__(kind)
    GdsStoreError.__init__(error, message)
    return error

"""A thread that runs jobs one after the other, and can be waited for."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

log = logging.getLogger("gdsstore.sglang")

J = TypeVar("J")


class Worker(Generic[J]):
    """`run` gets the jobs that wait, the oldest first, as many as `at_once` allows; it must not raise."""

    def __init__(
        self,
        name: str,
        run: Callable[[list[J]], None],
        at_once: Callable[[list[J]], int],
        device: int | None,
    ) -> None:
        self._run, self._at_once, self._device = run, at_once, device
        self._change = threading.Condition()
        self._jobs: deque[J] = deque()
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, job: J) -> None:
        with self._change:
            self._jobs.append(job)
            self._change.notify_all()

    def drain(self, timeout_s: float) -> list[J]:
        """Wait until all jobs are done, at most `timeout_s`; then take those that were not begun, and wait for the one that was.
        Returns what was taken."""
        with self._change:
            self._change.wait_for(self._idle, timeout_s)
            left = list(self._jobs)
            self._jobs.clear()
            while not self._change.wait_for(self._idle, 5.0):
                log.critical("%s is still at work; waiting for it", self._thread.name)
            return left

    def close(self) -> None:
        """End the thread; call `drain` before. Idempotent."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _idle(self) -> bool:
        return not self._jobs and not self._busy

    def _loop(self) -> None:
        with _device(self._device):
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._jobs or self._closed)
                    if not self._jobs:
                        return
                    waiting = list(self._jobs)
                    taken = [self._jobs.popleft() for _ in range(max(1, self._at_once(waiting)))]
                    self._busy = True
                try:
                    self._run(taken)
                finally:
                    with self._change:
                        self._busy = False
                        self._change.notify_all()


def _device(device: int | None) -> Any:
    """A stream of the thread's own: its copies of indices must not queue behind the forward."""
    if device is None:
        return contextlib.nullcontext()
    import torch

    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

"""The scheduler's threads."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from gdsstore.errors import EngineError
from gdsstore.transfer.scheduler_jobs import Call
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")


class Workers:
    """Up to `wanted` threads that carry out calls. They start when there is a call and no thread is free.

    Not thread-safe: the scheduler's lock guards `put`, `free`, `need_one` and `dismiss`. `carry_out` is called without it, and
    calls `free` in the end.
    """

    def __init__(self, wanted: int, carry_out: Callable[[Call[Any]], None]) -> None:
        self._wanted = wanted
        self._carry_out = carry_out
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads without a call, less the calls that are on their way to one

    def need_one(self) -> None:
        """Raises EngineError where not a single thread can be had."""
        if not self._threads:
            self._add_thread()

    def put(self, call: Call[Any]) -> None:
        self._calls.put(call)
        self._free -= 1
        if self._free < 0 and len(self._threads) < self._wanted:
            self._add_thread()

    def free(self) -> None:
        """The thread that calls this takes another call now."""
        self._free += 1

    def dismiss(self) -> None:
        """Threads end, each after the call that it has."""
        for _ in self._threads:
            self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.left_s)

    def _add_thread(self) -> None:
        # Daemons: a call that hangs in the kernel must not keep the process from exiting.
        thread = threading.Thread(
            target=self._serve, name=f"gdsstore-worker-{len(self._threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise EngineError(f"no thread could be started to move pages: {error}") from error
            log.warning("only %d of %d workers could be started", len(self._threads), self._wanted)
            self._wanted = len(self._threads)
            return
        self._threads.append(thread)
        self._free += 1

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._carry_out(call)
            del call  # nothing of it is kept while the thread waits

"""One answer for all who ask within the same second, made outside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from gdsstore.errors import DeadlineError, StoreError

T = TypeVar("T")
LEAST_AGE_S = 1.0
SHARE = 0.05  # of the time that making it may take: on a huge store it is made less often
PATIENCE_S = 5.0


class Shared(Generic[T]):
    """What `make` returned last, made again when it is asked for and too old. Thread-safe.

    `make` runs in a thread of its own, one at a time. That is a daemon thread: a drive that hangs must keep neither the event
    loop nor the end of the process waiting.
    """

    def __init__(self, make: Callable[[], T], least_age_s: float = LEAST_AGE_S) -> None:
        self._make, self._least_age_s = make, least_age_s
        self._lock = threading.Lock()
        self._current: Future[T] | None = None
        self._expires = 0.0
        self._pending: Future[T] | None = None
        self._began = 0.0  # when it was begun to make the pending one

    def ask(self) -> Future[T]:
        """The answer, or the one that is being made. Never blocks. Raises StoreError where there is no thread to make it."""
        with self._lock:
            if self._current is not None and time.monotonic() < self._expires:
                return self._current
            if self._pending is None:
                made: Future[T] = Future()
                made.set_running_or_notify_cancel()  # whoever stops waiting must not cancel it for the others
                thread = threading.Thread(target=self._run, args=(made,), name="gdsstore-status", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise StoreError("the daemon can have no more threads now; ask again") from error
                self._pending, self._began = made, time.monotonic()
            return self._pending

    async def latest(self, patience_s: float = PATIENCE_S) -> T:
        """Wait for the answer. Where it takes longer than `patience_s` seconds, an older one, which tells its age by itself.

        Raises DeadlineError where there is none, and what `make` raises.
        """
        made = self.ask()
        if self._hangs(patience_s):  # whoever waits is remembered until it ends, which may take days
            return self._older(patience_s)
        asked = asyncio.wrap_future(made)
        done, _ = await asyncio.wait([asked], timeout=patience_s)
        if done:
            return asked.result()
        asked.add_done_callback(lambda late: late.exception())  # nobody waits any more
        return self._older(patience_s)

    def wait(self, patience_s: float = PATIENCE_S) -> T:
        """As `latest`, for callers without an event loop."""
        asked = self.ask()
        wait([asked], patience_s)
        return asked.result() if asked.done() else self._older(patience_s)

    def _hangs(self, patience_s: float) -> bool:
        with self._lock:
            return self._pending is not None and time.monotonic() - self._began > patience_s

    def _older(self, patience_s: float) -> T:
        with self._lock:
            if self._current is not None:
                return self._current.result()
        raise DeadlineError(
            "the store's state could not be read in time; does a drive hang?", seconds=patience_s
        )

    def _run(self, future: Future[T]) -> None:
        started = time.monotonic()
        try:
            made = self._make()
        except BaseException as error:
            with self._lock:  # the next one who asks tries again
                self._pending = self._current = None
            future.set_exception(error)
            return
        now = time.monotonic()
        with self._lock:
            self._pending, self._current = None, future
            self._expires = max(started + self._least_age_s, now + (now - started) * (1 / SHARE - 1))
        future.set_result(made)

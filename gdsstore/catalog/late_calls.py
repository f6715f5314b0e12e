"""System calls that take as long as a drive likes, in threads that can be left alone with them: no drive hangs its callers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from gdsstore.errors import DeadlineError, StoreError
from gdsstore.waiting import Deadline

T = TypeVar("T")

MAX_IDLE = 16  # threads that are kept for the next calls

_Work = tuple[Future[Any], Callable[[], Any]]
_Inbox = queue.SimpleQueue[_Work | None]


class LateCalls:
    """Thread-safe. The threads are kept for reuse; they are daemons, so that a call that hangs keeps no process from ending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Inbox] = []
        self._closed = False

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in one of the threads; what it returns or raises is its future's. Wait with `result_by`; whoever gives up
        waiting leaves the call running. Raises StoreError where no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(inbox,), name="gdsstore-call", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise StoreError(f"no thread can be started for a call to the drive: {error}") from error
        inbox.put((future, call))
        return future

    def _run(self, inbox: _Inbox) -> None:
        kept = True
        while kept:
            work = inbox.get()
            if work is None:
                return
            future, call = work
            result = failure = None
            try:
                result = call()
            except BaseException as error:  # who waits for it gets it
                failure = error
            with self._lock:  # before anybody hears of the end: the next call is to find this thread
                kept = not self._closed and len(self._idle) < MAX_IDLE
                if kept:
                    self._idle.append(inbox)
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del work, future, call, result, failure  # an idle thread keeps nothing alive

    def close(self) -> None:
        """Let the threads end, each when its call has. Later calls are carried out all the same."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)


def result_by(future: Future[T], deadline: Deadline) -> T:
    """What a call returned, or raised. Raises DeadlineError where it has not ended by then."""
    try:
        return future.result(deadline.left_s)
    except TimeoutError:
        if future.done():  # the call's own, or it has ended since
            return future.result()
        raise DeadlineError("a drive did not answer in time") from None

"""Write transactions that their callers wait for up to a deadline.

LMDB lets one write at a time over all processes, behind a mutex that knows no deadline: its holder may be stopped, or wait for a
drive. So the transaction runs in a thread of its own, one of a process at a time, and is rolled back where nobody waits any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gdsstore.catalog.index import Catalog
from gdsstore.catalog.late_calls import LateCalls, result_by
from gdsstore.errors import DeadlineError
from gdsstore.waiting import Deadline

Work = Callable[[Any], None]
"""What is to be done in a transaction, which it is given."""


class _Left(Exception):  # noqa: N818 (it is no error)
    """Nobody waits any more: the transaction is rolled back."""


class TimedWrites:
    """Thread-safe."""

    def __init__(self, catalog: Catalog, calls: LateCalls) -> None:
        self._catalog, self._calls = catalog, calls
        # The others wait for it here, where a wait has a deadline: else every one of them would leave a thread behind.
        self._turn = threading.Lock()

    def write(self, work: Work, pages: int, deadline: Deadline, late: Callable[[Future[None]], None]) -> None:
        """Do `work` in a transaction about `pages` pages. Raises what that raises, StoreError as `Catalog.write` does, and
        DeadlineError: then nothing was changed, or, if `late` was called, will not be but where it was just ending. `late` is given
        the future of that end."""
        if not self._turn.acquire(timeout=deadline.left_s):
            raise DeadlineError("other saves wait for the catalog; its writer hangs, or its drive does")
        left = threading.Event()
        try:
            call = self._calls.start(lambda: self._run(work, pages, left))
        except BaseException:
            self._turn.release()
            raise
        try:
            result_by(call, deadline)
        except DeadlineError:
            left.set()
            late(call)
            raise DeadlineError(
                "the catalog could not be written in time; a process hangs in it, or its drive does"
            ) from None

    def _run(self, work: Work, pages: int, left: threading.Event) -> None:
        try:
            with self._catalog.write(pages=pages) as txn:
                work(txn)
                if left.is_set():
                    raise _Left
        finally:
            self._turn.release()

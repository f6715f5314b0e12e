"""Prefetches under way: their handles, and which keys they are bringing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.errors import GdsStoreError
from gdsstore.transfer.results import LoadResult


@dataclass(frozen=True, slots=True)
class Progress:
    """Pages of one prefetch. `warm`: in the host cache now, or already before; `wanted`: those that were asked for."""

    warm: int
    wanted: int


class Prefetch:
    """A prefetch under way. What it has brought can be loaded at once, whatever becomes of the rest. Thread-safe."""

    def __init__(self, keys: Sequence[bytes], wanted: int) -> None:
        """`wanted`: how many were asked for; `keys`: those that are brought."""
        self.keys = frozenset(keys)
        self._more = threading.Condition()
        self._warm, self._wanted = 0, wanted
        self.future: Future[LoadResult]

    def begin(self, future: Future[LoadResult]) -> None:
        """Say what it ends with, before anybody else sees the handle."""
        self.future = future
        future.add_done_callback(lambda _: self.add(0))

    @property
    def progress(self) -> Progress:
        with self._more:
            return Progress(self._warm, self._wanted)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.future.done()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most `timeout_s`; whether it has come. Never raises."""
        try:
            self.future.result(timeout_s)
        except FutureTimeoutError:
            return self.future.done()
        except (CancelledError, GdsStoreError):
            pass
        return True

    def cancel(self) -> bool:
        """Bring nothing more. True where it had not begun."""
        return self.future.cancel()

    def add(self, pages: int) -> None:
        """So many more are warm."""
        with self._more:
            self._warm += pages
            self._more.notify_all()

    def wait_for_more(self, warm: int, timeout_s: float) -> None:
        """Wait until more than `warm` pages are warm, or it has ended, at most `timeout_s`."""
        with self._more:
            self._more.wait_for(lambda: self._warm > warm or self.done, timeout_s)


class Prefetches:
    """The prefetches of one namespace that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[Prefetch] = []

    def add(self, prefetch: Prefetch) -> None:
        with self._lock:
            self._active = [*(each for each in self._active if not each.done), prefetch]

    def before_load(self, keys: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.bool_], list[Prefetch]]:
        """A load of these keys, uint8 (n, 32), begins: which of them are on their way, shape (n,), and by which prefetches.

        It goes before: a prefetch of nothing else ends with the chunks that it has under way, or does not begin, and the load
        brings the rest. One that has not begun brings nothing: it may need the worker of the load.
        """
        with self._lock:
            active = [each for each in self._active if not each.done]
        coming = np.zeros(len(keys), np.bool_)
        if not active:
            return coming, []
        wanted = [key.tobytes() for key in keys]
        for each in active:
            if each.keys.issubset(wanted):
                each.cancel()
        running = [each for each in active if each.future.running() and not each.keys.isdisjoint(wanted)]
        for each in running:
            coming |= np.fromiter((key in each.keys for key in wanted), np.bool_, len(wanted))
        return coming, running

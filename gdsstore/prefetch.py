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
        self._lock = threading.Lock()
        self._warm, self._wanted = 0, wanted
        self.future: Future[LoadResult]  # set before anybody else sees the handle

    @property
    def progress(self) -> Progress:
        with self._lock:
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
        with self._lock:
            self._warm += pages


class Prefetches:
    """The prefetches of one namespace that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[Prefetch] = []

    def add(self, prefetch: Prefetch) -> None:
        with self._lock:
            self._active = [*(each for each in self._active if not each.done), prefetch]

    def bringing(self, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.bool_], list[Prefetch]]:
        """Which of the keys are on their way, shape (n,), and by which prefetches."""
        with self._lock:
            active = [each for each in self._active if not each.done]
        mine = [each for each in active if not each.keys.isdisjoint(keys)]
        if not mine:
            return np.zeros(len(keys), np.bool_), []
        return np.array([any(key in each.keys for each in mine) for key in keys], np.bool_), mine

    def give_way(self, keys: Sequence[bytes]) -> None:
        """A load of these keys brings them itself: what has not begun for nothing else does not begin."""
        wanted = frozenset(keys)
        with self._lock:
            active = list(self._active)
        for each in active:
            if each.keys <= wanted and not each.done and not each.future.running():
                each.cancel()

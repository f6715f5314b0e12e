"""Pages that are stored, as the catalog says, and did not load.

SGLang aborts the requests of a failed load, and a client's retry looks the same pages up. They have to be a miss then, or it is
aborted in turn, for ever. What is damaged the store drops by itself; what came too late, or not because the drive was sick, it
keeps: that is a miss for a while, or until it is saved anew.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

QUARANTINE_S = 60.0

Mask = npt.NDArray[np.bool_]


class Quarantine:
    """Of one pool. Thread-safe. Keys are told apart by their first 8 bytes: what is taken for another's is a miss, no more."""

    def __init__(self, seconds: float = QUARANTINE_S) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # of those who change it; a reader takes the pair as it is
        self._held = (np.zeros(0, np.uint64), np.zeros(0, np.float64))  # keys, and until when
        self.failures = 0  # a remembered hit is of no use after one

    def add(self, keys: npt.NDArray[np.uint8]) -> None:
        """A load failed, and left these, (n, 32), stored; there may be none."""
        now = time.monotonic()
        with self._lock:
            held, until = self._held
            keep = (until > now) & ~np.isin(held, short(keys))
            until = np.append(until[keep], np.full(len(keys), now + self._seconds))
            self._held = (np.append(held[keep], short(keys)), until)
            self.failures += 1

    def lift(self, keys: npt.NDArray[np.uint8]) -> None:
        """These were saved anew."""
        if len(self._held[0]) == 0 or len(keys) == 0:
            return
        with self._lock:
            held, until = self._held
            keep = ~np.isin(held, short(keys))
            self._held = (held[keep], until[keep])

    def free(self, keys: npt.NDArray[np.uint8]) -> Mask:
        """Which of the keys are not held. Shape (n,)."""
        held, until = self._held
        if len(held) == 0:
            return np.ones(len(keys), np.bool_)
        return np.asarray(~np.isin(short(keys), held[until > time.monotonic()]), np.bool_)


def short(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of keys (n, 32), by which they are told apart where one taken for another does no harm. Shape (n,)."""
    return np.ascontiguousarray(keys[:, :8]).view(np.uint64).reshape(-1)

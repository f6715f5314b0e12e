"""What the store's side of a replay with time needs of a namespace, and its pages on their way."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.prefetch import Progress
from gdsstore.replay.truth import U8
from gdsstore.transfer.cost import Advice


class Prefetch(Protocol):
    """What is needed of a `gdsstore.Prefetch`."""

    @property
    def progress(self) -> Progress: ...

    @property
    def done(self) -> bool: ...

    def cancel(self) -> bool: ...


class Namespace(Protocol):
    """What is needed of a `BoundNamespace`."""

    def lookup(self, keys: U8) -> int: ...

    def contains(self, keys: U8) -> npt.NDArray[np.bool_]: ...

    def advise(self, pages: int, *, rest_tokens: int, wait_s: float, queued_bytes: int) -> Advice: ...

    def prefetch(self, keys: U8, *, deadline_s: float) -> Prefetch: ...

    def load(
        self, keys: U8, pages: U8, *, deadline_s: float
    ) -> Future[Any]: ...  # of a PageResult; so is save

    def save(self, keys: U8, pages: U8, *, deadline_s: float) -> Future[Any]: ...


class StorePrefetching:
    """Pages of one request on their way into the host cache. See `timed_server.Prefetching`."""

    def __init__(self, handle: Prefetch, pages: int) -> None:
        self._handle = handle
        self.pages = pages

    @property
    def ready(self) -> int:
        return self._handle.progress.warm

    @property
    def left(self) -> int:
        """Pages that are still to come."""
        return 0 if self._handle.done else self.pages - self.ready

    def cancel(self) -> None:
        self._handle.cancel()


class StoreLoading:
    """Pages of one request that are being loaded. See `timed_server.Loading`."""

    def __init__(self, keys: U8) -> None:
        self.keys = keys
        self.ready = 0
        self.asked = 0  # pages that a chunk was begun for
        self._over = threading.Event()

    @property
    def pages(self) -> int:
        return len(self.keys)

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout_s: float) -> None:
        self._over.wait(max(0.0, timeout_s))

    def cancel(self) -> None:
        self._over.set()

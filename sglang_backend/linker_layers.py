"""The one place where a load by layers is asked for, and what becomes of its layers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gdsstore import BoundNamespace, LoadResult
from gdsstore.engines.base import Transfer
from gdsstore.transfer.results import CallResult

log = logging.getLogger("gdsstore.sglang")

Mask = npt.NDArray[np.bool_]
OnLayers: TypeAlias = Callable[[int, int, Mask], None]

LATE_S = 5.0  # after its deadline a call is waited for, and this often it is said
POLL_S = 0.002


def load_layers(
    bound: BoundNamespace, keys: npt.NDArray[np.uint8], pages: Any, on_layers: OnLayers, deadline_s: float
) -> Future[LoadResult]:
    """Start a load. `on_layers` is called from a thread of the store's, in order of the layers, before their pages are verified;
    whether all was right says the result."""
    return bound.load_layers(keys, pages, on_layers, deadline_s=deadline_s)


def load_warm(
    bound: BoundNamespace, keys: npt.NDArray[np.uint8], pages: Any, deadline_s: float
) -> Future[LoadResult]:
    """Start a load of pages that the host cache has, most of them at least. They come as a whole, and verified."""
    return bound.load(keys, pages, deadline_s=deadline_s)


class Progress:
    """Completes the layers of the forward, in order, as those of the loads come. Thread-safe.

    `needed_at`: for each load the forward's layer before which each of its own must have come, rising. `complete`: called once
    for each layer. A layer with a page that failed is not completed, nor are those after it, until nothing writes to the rows any
    more: SGLang gives them away as soon as it knows of a failure.
    """

    def __init__(
        self, needed_at: Sequence[Sequence[int]], layers: int, complete: Callable[[int], None]
    ) -> None:
        self._needed_at, self._layers, self._complete = needed_at, layers, complete
        self._lock = threading.Lock()
        self._come = [0] * len(needed_at)
        self._bad = False
        self._told = 0

    def of(self, number: int) -> OnLayers:
        """What to call with the layers of one load."""

        def on_layers(first: int, last: int, ok: Mask) -> None:
            with self._lock:
                self._bad |= not ok.all()
                self._come[number] = last
                if not self._bad:
                    self._tell()

        return on_layers

    def finish(self) -> None:
        """All layers have come, or there were none to load."""
        with self._lock:
            self._come = [len(layers) for layers in self._needed_at]
            self._tell()

    def _tell(self) -> None:
        ready = self._layers
        for come, needed_at in zip(self._come, self._needed_at, strict=True):
            ready = min(ready, needed_at[come]) if come < len(needed_at) else ready
        while self._told < ready:
            self._complete(self._told)
            self._told += 1


def ended(future: Future[Any], what: str, patience_s: float) -> CallResult | Exception:
    """The result of a call, or why there is none. The store ends every call by its deadline; if one is later than `patience_s` it
    is said, and waited for all the same: the memory comes first."""
    while not wait([future], patience_s).done:
        patience_s = LATE_S
        log.critical("%s is late; its rows are not given back before it ends", what)
    error = future.exception()
    if error is not None:
        return error if isinstance(error, Exception) else RuntimeError(str(error))
    result: CallResult = future.result()
    return result


def let_go(bound: BoundNamespace, pages: Any, result: CallResult, what: str) -> None:
    """Return when nothing writes to the rows of a load any more. What a drive still writes into memory of the store's own is
    nothing to them; where the drive, or the device, was given the rows themselves it is waited for."""
    missed = np.flatnonzero(~result.ok)
    in_place = (
        bool(bound.in_place(pages, len(result.status))[missed].any()) if result.memory_in_use else False
    )
    said = time.monotonic()
    while any(not work.done for work in result.unfinished if in_place or not isinstance(work, Transfer)):
        if time.monotonic() - said > LATE_S:
            said = time.monotonic()
            log.critical("rows of %s are still written to; waiting for it", what)
        time.sleep(POLL_S)

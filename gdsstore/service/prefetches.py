"""The prefetches of one client: the store orders and bounds them, this remembers them for whoever asks."""

from __future__ import annotations

from gdsstore.node.messages import PrefetchState, Progress, Refusal
from gdsstore.prefetch import Prefetch
from gdsstore.service.refused import RefusedError

MOST_PREFETCHES = 256  # of one client


class Prefetches:
    """For the event loop's thread."""

    def __init__(self) -> None:
        self._handles: dict[int, Prefetch] = {}
        self._number = 0

    @property
    def under_way(self) -> int:
        return sum(not handle.done for handle in list(self._handles.values()))  # another thread may ask

    def make_room(self) -> None:
        """For one more; those that ended first are forgotten first. Raises RefusedError where too many have not ended."""
        if len(self._handles) < MOST_PREFETCHES:
            return
        ended = [number for number, handle in self._handles.items() if handle.done]
        for number in ended[: MOST_PREFETCHES // 2]:
            del self._handles[number]
        if not ended:
            raise RefusedError(Refusal.LIMIT, f"a client has at most {MOST_PREFETCHES} prefetches under way")

    def add(self, handle: Prefetch) -> int:
        """Its number."""
        self._number += 1
        self._handles[self._number] = handle
        return self._number

    def progress(self, number: int) -> Progress:
        handle = self._handles.get(number)
        if handle is None:
            return Progress(PrefetchState.UNKNOWN, 0, 0)
        found = handle.progress
        return Progress(_state(handle), found.warm, found.wanted)

    def cancel(self, number: int) -> None:
        """Bring no more than what is under way."""
        handle = self._handles.get(number)
        if handle is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        for number in list(self._handles):
            self.cancel(number)


def _state(handle: Prefetch) -> PrefetchState:
    future = handle.future
    if future.cancelled():
        return PrefetchState.CANCELLED
    if future.done():
        return PrefetchState.DONE if future.exception() is None else PrefetchState.FAILED
    return PrefetchState.RUNNING if future.running() else PrefetchState.WAITING

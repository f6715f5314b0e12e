"""Records that a client's process reads in the daemon's memory: pinned for it, until it gives them back or is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gdsstore.node.messages import Refusal
from gdsstore.service.refused import RefusedError

MOST_LEASES = 1024  # of one client
LEASE_S = 60.0  # a process that is stopped must not keep records in place for ever; who reads one later finds that it changed


@dataclass(slots=True)
class _Held:
    release: Callable[[], None]
    pages: int
    ends: float


class Leases:
    """Of one client. For the event loop's thread."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def pages(self) -> int:
        return sum(held.pages for held in list(self._held.values()))  # the status asks from another thread

    def check_room(self) -> None:
        """Raises RefusedError where one more is too many."""
        if len(self._held) >= MOST_LEASES:
            raise RefusedError(Refusal.LIMIT, f"a client holds at most {MOST_LEASES} leases")

    def add(self, release: Callable[[], None], pages: int) -> int:
        """The number of a new lease. `release` must not block."""
        self._number += 1
        self._held[self._number] = _Held(release, pages, time.monotonic() + LEASE_S)
        return self._number

    def release(self, number: int) -> None:
        """One that is not known has run out."""
        held = self._held.pop(number, None)
        if held is not None:
            held.release()

    def release_all(self) -> None:
        for number in list(self._held):
            self.release(number)

    def release_old(self) -> int:
        """Take back what was held too long; how many."""
        now = time.monotonic()
        old = [number for number, held in self._held.items() if held.ends <= now]
        for number in old:
            self.release(number)
        return len(old)

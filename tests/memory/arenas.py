"""What the tests of arenas share: a small arena, and a thread that asks it for a lease."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gdsstore.memory.arena import Arena, Lease

SLOT = 4096
ROOM = 16 * SLOT
SOON_S = 60.0  # for what must happen; a test that waits this long has failed


def small_arena(size_bytes: int = ROOM, slot_bytes: int = SLOT) -> Arena:
    return Arena(size_bytes, slot_bytes, huge_pages="off", pin="off")


class Waiter:
    """A thread that asks for a lease."""

    def __init__(self, arena: Arena, nbytes: int, timeout_s: float = 10 * SOON_S) -> None:
        self.lease: Lease | None = None
        self.error: Exception | None = None
        self._arena, self._nbytes, self._timeout_s = arena, nbytes, timeout_s
        self._waiting = arena.stats().waits
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.lease = self._arena.lease(self._nbytes, self._timeout_s)
        except Exception as error:
            self.error = error

    def waits(self) -> Waiter:
        """Return once the thread waits for room."""
        _until(lambda: self._arena.stats().waits > self._waiting)
        return self

    def ended(self) -> Waiter:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        return self


def _until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(int(SOON_S / 0.001)):
        if condition():
            return
        tick.wait(0.001)
    raise AssertionError("did not happen in time")

"""Which volume the next pages go to: striped, in proportion to free space."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gdsstore.volume.volume import Volume

REFRESH_S = 5.0


class Placement:
    """Smooth weighted round robin. Not thread-safe: its pool's lock guards it."""

    def __init__(self, volumes: Sequence[Volume]) -> None:
        self._volumes = volumes
        self._credit = np.zeros(len(volumes))
        self._weights = np.ones(len(volumes))
        self._next_refresh = 0.0

    def choose(self) -> int:
        """The index of a volume."""
        if len(self._volumes) == 1:
            return 0
        if time.monotonic() >= self._next_refresh:
            self._weights = np.array([max(1, volume.space().free_bytes) for volume in self._volumes], float)
            self._next_refresh = time.monotonic() + REFRESH_S
        self._credit += self._weights / self._weights.sum()
        chosen = int(self._credit.argmax())
        self._credit[chosen] -= 1.0
        return chosen

    def roomiest(self) -> int:
        """The volume with the most free space, now. Takes no turn."""
        return max(self._volumes, key=lambda volume: volume.space().free_bytes).index

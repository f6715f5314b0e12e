"""Which volume the next pages go to: striped, in proportion to free space."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from gdsstore.volume.volume import Volume

REFRESH_S = 5.0


class Placement:
    """Smooth weighted round robin. Not thread-safe: its pool's lock guards it."""

    def __init__(
        self, volumes: Sequence[Volume], usable: Callable[[int], bool] = lambda volume: True
    ) -> None:
        """`usable`: whether a volume, by its index, may be saved to now."""
        self._volumes, self._usable = volumes, usable
        self._credit = np.zeros(len(volumes))
        self._weights = np.ones(len(volumes))
        self._next_refresh = 0.0

    def usable(self, volume: int) -> bool:
        """Whether pages may go to this volume now."""
        return self._usable(volume)

    def choose(self) -> int | None:
        """The index of a volume; None where none is usable now."""
        usable = np.array([self._usable(volume.index) for volume in self._volumes])
        if not usable.any():
            return None
        if len(self._volumes) == 1:
            return 0
        if time.monotonic() >= self._next_refresh:
            self._weights = np.array([max(1, volume.space().free_bytes) for volume in self._volumes], float)
            self._next_refresh = time.monotonic() + REFRESH_S
        weights = np.where(usable, self._weights, 0.0)
        self._credit += weights / weights.sum()
        chosen = int(np.where(usable, self._credit, -np.inf).argmax())
        self._credit[chosen] -= 1.0
        return chosen

    def roomiest(self, among: Sequence[int] | None = None) -> int:
        """The volume with the most free space, now. `among`: indices of volumes; None: all. Takes no turn."""
        volumes = self._volumes if among is None else [self._volumes[index] for index in among]
        return max(volumes, key=lambda volume: volume.space().free_bytes).index

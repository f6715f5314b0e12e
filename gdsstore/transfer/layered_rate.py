"""How fast layer-wise loads came, for the planning of the next ones."""

from __future__ import annotations

import threading

from gdsstore.sizes import MiB

FIRST_BANDWIDTH = 2e9  # bytes a second, before anything was measured: one drive
WEIGHT = 0.3  # of the last load: drives drift within seconds
LEAST_BYTES = 4 * MiB  # smaller loads measure what a call costs


class LoadRate:
    """Bytes a second, as a moving average. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bandwidth: float | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes a second, above 0."""
        with self._lock:
            return self._bandwidth or FIRST_BANDWIDTH

    def add(self, nbytes: int, seconds: float) -> None:
        """A load brought so many bytes in that time."""
        if nbytes < LEAST_BYTES or seconds <= 0:
            return
        now = nbytes / seconds
        with self._lock:
            before = self._bandwidth
            self._bandwidth = now if before is None else before + WEIGHT * (now - before)


class LoadRates:
    """One for the host's memory, and one for each device's: they are reached on different ways. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates: dict[int | None, LoadRate] = {}

    def of(self, device: int | None) -> LoadRate:
        """`device`: its ordinal; None: the host."""
        with self._lock:
            return self._rates.setdefault(device, LoadRate())

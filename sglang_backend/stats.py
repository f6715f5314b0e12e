"""What SGLang's `StorageMetrics` wants to know: pages and GB/s of each read and write since it last asked."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

GB = 1e9
KEPT = 4096  # observations that nobody fetched: metrics are off, or the scheduler stands still


@dataclass(slots=True)
class Observations:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class TransferStats:
    """Thread-safe; `take` costs a swap of pointers, since SGLang calls it in every scheduler step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Observations()

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            if pages and len(self._now.prefetch_pgs) < KEPT:
                self._now.prefetch_pgs.append(pages)
                self._now.prefetch_bandwidth.append(nbytes / GB / max(seconds, 1e-9))

    def saved(self, pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            if pages and len(self._now.backup_pgs) < KEPT:
                self._now.backup_pgs.append(pages)
                self._now.backup_bandwidth.append(nbytes / GB / max(seconds, 1e-9))

    def take(self) -> Observations:
        """The observations since the last call."""
        with self._lock:
            taken, self._now = self._now, Observations()
        return taken

"""How long calls waited for their turn, and how long they ran, by class."""

from __future__ import annotations

import time
from typing import TypeVar

from gdsstore.observe.histogram import Histogram, HistogramStats
from gdsstore.observe.nvtx import RANGES
from gdsstore.transfer.policy_terms import TransferClass
from gdsstore.transfer.scheduler_jobs import Call

T = TypeVar("T")


class CallTimes:
    """Thread-safe. Calls that were never begun are in neither, those that joined another one included."""

    def __init__(self) -> None:
        self._waited = {cls: Histogram() for cls in TransferClass}
        self._ran = {cls: Histogram() for cls in TransferClass}
        self._ranges = {cls: RANGES.around(cls.name.lower()) for cls in TransferClass}

    def carry_out(self, call: Call[T]) -> T | BaseException:
        """See `Call.carry_out`."""
        request, start = call.job.request, time.monotonic()
        cls = request.entered
        self._waited[cls].observe(start - request.since)
        with self._ranges[cls]:
            result = call.carry_out()
        self._ran[cls].observe(time.monotonic() - start)
        return result

    def waited(self) -> dict[str, HistogramStats]:
        """Seconds from the submission until a worker began it, by the names of TransferClass in small letters."""
        return {cls.name.lower(): histogram.stats() for cls, histogram in self._waited.items()}

    def ran(self) -> dict[str, HistogramStats]:
        """Seconds from there to the end, likewise."""
        return {cls.name.lower(): histogram.stats() for cls, histogram in self._ran.items()}

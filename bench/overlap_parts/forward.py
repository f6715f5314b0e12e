"""A forward that computes nothing: it waits for each layer, and then sleeps for as long as the layer would take."""

from __future__ import annotations

import threading
import time

from gdsstore.errors import DeadlineError
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.pipeline import LayerGate, Mask
from overlap_parts.sizes import LAYOUT

WAIT_S = 120.0


class Forward:
    """Runs in a thread of its own. `on_layers` is for `load_layers`."""

    def __init__(self, pages: int, layer_s: float) -> None:
        self.groups: list[LayerGroup] = []
        self.arrived: list[float] = []  # of each layer, on `time.perf_counter`
        self._gate, self._layer_s = LayerGate(pages), layer_s
        self._end: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def on_layers(self, first: int, last: int, ok: Mask) -> None:
        self.groups.append(LayerGroup(first, last))
        self.arrived += [time.perf_counter()] * (last - first)
        self._gate.open(first, last, ok)

    def end(self) -> float:
        """When it ended. Raises DeadlineError where a layer did not come."""
        self._thread.join(WAIT_S)
        if self._end is None:
            raise DeadlineError("a layer did not come, or not of all pages", layers=len(self.arrived))
        return self._end

    def _run(self) -> None:
        end = 0.0
        for layer in range(LAYOUT.layers):
            if not self._gate.wait(layer, WAIT_S).all():
                return
            end = sleep_layer(max(end, self.arrived[layer]), self._layer_s)
        self._end = max(end, time.perf_counter())


def forward_alone(layer_s: float) -> float:
    """Seconds that it takes when nothing is loaded."""
    start = end = time.perf_counter()
    for _ in range(LAYOUT.layers):
        end = sleep_layer(end, layer_s)
    return max(end, time.perf_counter()) - start


def sleep_layer(start: float, layer_s: float) -> float:
    """When a layer ends that begins at `start`. Sleeps are late by more than some layers take, so that clocks are kept apart."""
    end = start + layer_s
    left = end - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return end

"""The layer-wise pipeline: layer groups under way one behind the other, each told to the forward when it has come.

Knows nothing of engines and pages' places: what moves a group is handed in. The mirror for saves is the same with a
`LayersComputed`, which holds back each group until the forward has computed it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.transfer.groups import LayerGroup
from gdsstore.waiting import Deadline, pause

log = logging.getLogger("gdsstore.transfer")

POLL_S = 0.0002  # a layer group takes a millisecond or more
READY_POLL_S = 0.001  # less often: the forward's own thread wants the GIL, to queue what comes next
LOOK_S = 0.02  # whether a save that waits for the forward is to stop

Mask = npt.NDArray[np.bool_]


class GroupTransfer(Protocol):
    """A layer group under way."""

    @property
    def done(self) -> bool:
        """Whether it has ended, and lets go of the memory. May carry on its work; waits only where there is nothing else to do
        for the whole pipeline."""
        ...

    def wait(self, timeout_s: float) -> Mask:
        """Wait for the end, `timeout_s` at most. Which of the pages that it was given came whole; shape (pages,)."""
        ...

    def cancel(self) -> None:
        """What has not begun need not begin any more. Does not wait."""
        ...


StartGroup = Callable[[LayerGroup, Mask], GroupTransfer]
"""Starts a group for the pages that are still good, shape (pages,). Raises only if nothing was started."""

OnLayers = Callable[[int, int, Mask], None]
"""Called with layers first to last (not included), and the pages that are good in all layers up to there."""


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """`ok`: the pages that are good in all layers, shape (pages,). `unfinished`: groups that a deadline or a cancel has overtaken
    and that still hold on to their memory. `idle_s`: seconds in which nothing was under way, since nothing was computed."""

    ok: Mask
    unfinished: tuple[GroupTransfer, ...]
    idle_s: float


class LayersComputed:
    """How far the forward is, for saves. Thread-safe."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._steps: list[tuple[int, Callable[[], bool] | None]] = []

    def computed(self, layers: int, ready: Callable[[], bool] | None = None) -> None:
        """Layers 0 to `layers` (not included) are computed; with `ready`, once it returns true. That is for forwards that are only
        queued on a device: the `query` of a torch event that was recorded behind the layers. It must not wait."""
        with self._change:
            self._steps.append((layers, ready))
            self._change.notify_all()

    def has(self, group: LayerGroup) -> bool:
        """Whether a group is computed. Raises what `ready` raises."""
        ready = self._ready(group)
        return ready is not None and ready()

    def wait(self, group: LayerGroup, timeout_s: float) -> None:
        """Wait until there is something new to be said of a group, at most `timeout_s`."""
        with self._change:
            if not self._change.wait_for(lambda: self._ready(group) is not None, timeout_s):
                return
        if not self.has(group):
            pause(min(READY_POLL_S, timeout_s))

    def _ready(self, group: LayerGroup) -> Callable[[], bool] | None:
        """What says whether a group is computed: the first step that holds it, or one that is over; None where none holds it."""
        holding = [ready for layers, ready in self._steps if layers >= group.last]
        if None in holding:
            return _over
        return holding[0] if holding else None


def _over() -> bool:
    return True


class LayerGate:
    """What a forward waits at before each layer; its `open` is an OnLayers. Thread-safe."""

    def __init__(self, pages: int) -> None:
        self._change = threading.Condition()
        self._open = 0
        self._ok = np.ones(pages, np.bool_)

    def open(self, first: int, last: int, ok: Mask) -> None:
        with self._change:
            self._open, self._ok = last, ok
            self._change.notify_all()

    def wait(self, layer: int, timeout_s: float) -> Mask:
        """The pages that are good up to this layer, once it is there. None is good where it did not come in time."""
        with self._change:
            if self._change.wait_for(lambda: self._open > layer, timeout_s):
                return self._ok
            return np.zeros(len(self._ok), np.bool_)


class LayerPipeline:
    """Moves `pages` pages in `groups`, of which `ahead` are under way at a time. Make a new one for each load or save.

    A page that fails in one group is left out of the later ones; the others go on. `on_layers` is called once for each group, in
    order and from the thread that runs the pipeline, whatever happens: after a cancel or the deadline with no page good, so that
    nobody waits for layers that do not come.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        pages: int,
        start: StartGroup,
        on_layers: OnLayers,
        *,
        ahead: int = 2,
        computed: LayersComputed | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`computed`: for saves, a group starts when it has been computed. `stop`: whether to end the run early.

        Raises ArgumentError where groups are not in order.
        """
        if ahead < 1:
            raise ArgumentError("at least one group must be under way", ahead=ahead)
        ends = [0, *(group.last for group in groups)]
        if any(group.first != end or group.layers < 1 for group, end in zip(groups, ends, strict=False)):
            raise ArgumentError("layer groups must hold every layer once, in order", groups=list(groups))
        self._groups, self._start, self._on_layers = tuple(groups), start, on_layers
        self._ahead, self._computed, self._stop = ahead, computed, stop
        self._idle_s = 0.0
        self._ok: Mask = np.ones(pages, np.bool_)
        self._flying: deque[tuple[LayerGroup, Mask, GroupTransfer | None]] = deque()
        self._next = self._told = 0  # groups
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the run as soon as possible. From any thread."""
        self._cancelled.set()

    def run(self, deadline: Deadline) -> PipelineResult:
        """Move everything, in the calling thread. Raises only what `on_layers` raises."""
        try:
            while self._told < len(self._groups):
                if self._cancelled.is_set() or self._stop() or deadline.passed:
                    self._ok = np.zeros_like(self._ok)
                    break
                self._start_more()
                if not self._finish_first(deadline):
                    self._wait(deadline)
            for group in self._groups[self._told :]:
                self._tell(group, self._ok)
        finally:
            unfinished = self._let_go()
        return PipelineResult(self._ok, unfinished, self._idle_s)

    def _wait(self, deadline: Deadline) -> None:
        if self._flying or self._computed is None:
            pause(min(POLL_S, deadline.left_s))
            return
        start = time.monotonic()
        self._computed.wait(self._groups[self._next], min(LOOK_S, deadline.left_s))
        self._idle_s += time.monotonic() - start

    def _start_more(self) -> None:
        while self._next < len(self._groups) and len(self._flying) < self._ahead:
            group = self._groups[self._next]
            if self._computed is not None and not self._computed.has(group):
                return
            self._next += 1
            wanted = self._ok.copy()
            transfer = None
            if wanted.any():
                try:
                    transfer = self._start(group, wanted)
                except Exception:  # as if each of its pages had failed: a forward waits for the layers
                    log.exception("layers %d to %d could not be started", group.first, group.last)
                    wanted = np.zeros_like(wanted)
            self._flying.append((group, wanted, transfer))

    def _finish_first(self, deadline: Deadline) -> bool:
        """Take the result of the oldest group, if it has ended."""
        if not self._flying:
            return False
        group, wanted, transfer = self._flying[0]
        if transfer is not None and not transfer.done:
            return False
        self._flying.popleft()
        came = wanted
        if transfer is not None:
            try:
                came = wanted & transfer.wait(deadline.left_s)
            except Exception:
                log.exception("layers %d to %d have no result", group.first, group.last)
                came = np.zeros_like(wanted)
        self._tell(group, self._ok & came)
        return True

    def _tell(self, group: LayerGroup, ok: Mask) -> None:
        self._ok = ok
        self._told += 1
        self._on_layers(group.first, group.last, ok)

    def _let_go(self) -> tuple[GroupTransfer, ...]:
        transfers = [transfer for _, _, transfer in self._flying if transfer is not None]
        for transfer in transfers:
            transfer.cancel()
        self._flying.clear()
        return tuple(transfer for transfer in transfers if not transfer.done)

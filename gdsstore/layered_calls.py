"""Layer-wise loads as calls: groups are planned when their turn has come, and whoever waits for layers is always told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gdsstore.layered_plan import LayerPlan
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.layered import load_layers
from gdsstore.transfer.layered_cuts import block_ranges
from gdsstore.transfer.load import Landed, LoadJob, StillThere
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.pipeline import Mask, OnLayers
from gdsstore.transfer.results import LoadResult, PageStatus, Statuses
from gdsstore.waiting import Deadline
from gdsstore.warm_layers import WarmLayers

log = logging.getLogger("gdsstore.store")


class LayeredLoad:
    """One call of `load_layers`, for `pages` pages."""

    def __init__(self, plan: LayerPlan, pages: int, on_layers: OnLayers) -> None:
        self._plan, self._pages, self._on_layers = plan, pages, on_layers
        self._layers = plan.layout.layers
        self._told = 0  # layers
        self._at: npt.NDArray[np.intp] = np.arange(pages)
        self._warm: WarmLayers | None = None

    def run(self, load: Callable[[], LoadResult]) -> LoadResult:
        """The result of `load`, which comes to `read` where it finds any page. Then all layers were told of."""
        try:
            return load()
        finally:
            self.tell_rest()

    def beside(self, warm: WarmLayers, at: npt.NDArray[np.intp]) -> None:
        """Some of the pages come from the host cache. What is read from here on is the call of the pages `at`."""
        self._warm, self._at = warm, at

    def tell_rest(self) -> None:
        """Tell of all layers that were not told of yet, where only warm pages can be good."""
        if self._told < self._layers:
            groups = [(self._told, self._layers)]
            if self._warm is not None and len(self._warm.at) and self._told == 0:
                groups = list(self._plan.groups(len(self._warm.at)))
            for first, last in groups:
                self._tell(first, last, np.zeros(0, np.intp))

    def unstarted(self, outcome: PageStatus) -> LoadResult:
        """The result of a call whose turn never came."""
        self.tell_rest()
        return LoadResult(np.full(self._pages, outcome, np.uint8))

    def read(
        self,
        mover: Mover,
        job: LoadJob,
        status: Statuses,
        chunk_bytes: int,
        verify: bool,
        still_there: StillThere,
        deadline: Deadline,
        admission: Admission,
        landed: Landed | None = None,
    ) -> LoadResult:
        """As `transfer.load.load`, layer by layer."""
        groups = self._plan.groups(len(job.at))
        ranges = block_ranges(self._plan.layout, groups)
        start = time.monotonic()
        result = load_layers(
            mover,
            job,
            groups,
            ranges,
            lambda first, last, ok: self._tell(first, last, job.at[ok]),
            status,
            chunk_bytes,
            verify,
            still_there,
            deadline,
            admission,
            landed,
        )
        loaded = int(np.count_nonzero(status[job.at] == PageStatus.LOADED))
        self._plan.learn(loaded, ranges, time.monotonic() - start)
        return result

    def tell_whole(self, good: npt.NDArray[np.intp]) -> None:
        """All layers of the pages `good`, by their positions in the call that would have come to `read`, are there."""
        self._tell(0, self._layers, good)

    def _tell(self, first: int, last: int, good: npt.NDArray[np.intp]) -> None:
        ok: Mask = np.zeros(self._pages, np.bool_)
        ok[self._at[good]] = True
        if self._warm is not None:
            ok[self._warm.bring(first, last)] = True
        self._told = last
        try:
            self._on_layers(first, last, ok)
        except Exception:  # the load goes on: its memory is being written to, and its result is waited for
            log.exception("the callback for layers %d to %d raised", first, last)

"""Layer-wise loads as calls: groups are planned when their turn has come, and whoever waits for layers is always told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gdsstore.layout import ByteOrder, PageLayout
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.groups import (
    LEAST_PIECE_BYTES,
    LayerGroup,
    LayerLoad,
    checked_groups,
    plan_groups,
)
from gdsstore.transfer.layered import load_layers
from gdsstore.transfer.layered_cuts import block_ranges
from gdsstore.transfer.layered_rate import LoadRate
from gdsstore.transfer.load import LoadJob, StillThere
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.pipeline import Mask, OnLayers
from gdsstore.transfer.results import LoadResult, PageStatus, Statuses
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.store")

UNCUT = (ByteOrder.OPAQUE, ByteOrder.TOKEN_LAYER)  # their layers are no byte ranges
REQUEST_S = 0.0005  # what a group takes besides its bytes: checksums and copies of its last chunk
# And each of its requests, as bytes: 1,024 pages in pieces of 128 KiB took 7 % longer than in whole records of 1 MiB.
PIECE_COST_BYTES = 8 << 10
# Of a page, in one request into device memory: each is a call of Python's there, and they share one lock.
LEAST_DEVICE_PIECE_BYTES = 256 << 10
# Compute that takes about as long as the I/O is planned for as if exactly so: drives drift more than that within a load, and groups
# that are right for a bit more or less let the forward wait an eighth longer (measured) when it is the other way round.
ALIKE = 2.0


class LayeredLoad:
    """One call of `load_layers`, for `pages` pages."""

    def __init__(
        self,
        layout: PageLayout,
        rate: LoadRate,
        pages: int,
        on_layers: OnLayers,
        compute_s_per_layer: float | None,
        groups: Sequence[LayerGroup] | None,
        *,
        on_device: bool,
    ) -> None:
        """Raises ArgumentError where groups do not fit the layout, or times are no times."""
        self._layout, self._rate, self._pages = layout, rate, pages
        self._on_layers = on_layers
        self._least_piece_bytes = LEAST_DEVICE_PIECE_BYTES if on_device else LEAST_PIECE_BYTES
        self._told = 0  # layers
        self._groups = None if groups is None else checked_groups(groups, layout.layers)
        if self._groups is not None:
            block_ranges(layout, self._groups)
        self._load = LayerLoad(
            layers=layout.layers,
            pages=max(1, pages),
            layer_bytes=layout.layer_bytes,
            bandwidth=rate.bandwidth,
            compute_s=compute_s_per_layer,
        )

    def run(self, load: Callable[[], LoadResult]) -> LoadResult:
        """The result of `load`, which comes to `read` where it finds any page. Then all layers were told of."""
        try:
            return load()
        finally:
            self._tell_rest()

    def unstarted(self, outcome: PageStatus) -> LoadResult:
        """The result of a call whose turn never came."""
        self._tell_rest()
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
    ) -> LoadResult:
        """As `transfer.load.load`, layer by layer."""
        groups = self._groups or self._plan(len(job.at))
        ranges = block_ranges(self._layout, groups)
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
        )
        loaded = int(np.count_nonzero(status[job.at] == PageStatus.LOADED))
        page_bytes = job.record_bytes + sum(map(len, ranges)) * PIECE_COST_BYTES
        self._rate.add(loaded * page_bytes, time.monotonic() - start - len(groups) * REQUEST_S)
        return result

    def _plan(self, pages: int) -> tuple[LayerGroup, ...]:
        layers = self._layout.layers
        if self._layout.order in UNCUT or layers == 1:
            return (LayerGroup(0, layers),)
        pieces = len(self._layout.slices(0, 1))
        bandwidth = self._rate.bandwidth
        request_s = REQUEST_S + pieces * pages * PIECE_COST_BYTES / bandwidth
        load = replace(self._load, pages=pages, bandwidth=bandwidth, request_s=request_s)
        if load.io_s / ALIKE <= load.forward_s <= load.io_s * ALIKE:
            load = replace(load, compute_s=load.io_s)
        return plan_groups(load, least_piece_bytes=pieces * self._least_piece_bytes)

    def _tell(self, first: int, last: int, good: npt.NDArray[np.intp]) -> None:
        ok: Mask = np.zeros(self._pages, np.bool_)
        ok[good] = True
        self._told = last
        try:
            self._on_layers(first, last, ok)
        except Exception:  # the load goes on: its memory is being written to, and its result is waited for
            log.exception("the callback for layers %d to %d raised", first, last)

    def _tell_rest(self) -> None:
        if self._told < self._layout.layers:
            self._tell(self._told, self._layout.layers, np.zeros(0, np.intp))

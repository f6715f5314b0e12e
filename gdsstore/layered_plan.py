"""How the layers of one layer-wise call are grouped: as the caller says, or by what is known of the drive and the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gdsstore.layout import ByteOrder, ByteRange, PageLayout
from gdsstore.transfer.groups import (
    LEAST_PIECE_BYTES,
    LayerGroup,
    LayerLoad,
    checked_groups,
    plan_groups,
)
from gdsstore.transfer.layered_cuts import block_ranges
from gdsstore.transfer.layered_rate import LoadRate

UNCUT = (ByteOrder.OPAQUE, ByteOrder.TOKEN_LAYER)  # their layers are no byte ranges
REQUEST_S = 0.0005  # what a group takes besides its bytes: checksums and copies of its last chunk
# And each of its requests, as bytes: 1,024 pages in pieces of 128 KiB took 7 % longer than in whole records of 1 MiB.
PIECE_COST_BYTES = 8 << 10
# Of a page, in one request into device memory: each is a call of Python's there, and they share one lock.
LEAST_DEVICE_PIECE_BYTES = 256 << 10
# Compute that takes about as long as the I/O is planned for as if exactly so: drives drift more than that within a load, and groups
# that are right for a bit more or less let the forward wait an eighth longer (measured) when it is the other way round.
ALIKE = 2.0


class LayerPlan:
    """For one call. `rate`: what is known of the drives' speed, and learns from the call."""

    def __init__(
        self,
        layout: PageLayout,
        rate: LoadRate,
        pages: int,
        compute_s_per_layer: float | None,
        groups: Sequence[LayerGroup] | None,
        *,
        on_device: bool,
    ) -> None:
        """Raises ArgumentError where groups do not fit the layout, or times are no times."""
        self.layout, self._rate = layout, rate
        self._least_piece_bytes = LEAST_DEVICE_PIECE_BYTES if on_device else LEAST_PIECE_BYTES
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

    def groups(self, pages: int) -> tuple[LayerGroup, ...]:
        """For a load of so many pages."""
        if self._groups is not None:
            return self._groups
        layers = self.layout.layers
        if self.layout.order in UNCUT or layers == 1:
            return (LayerGroup(0, layers),)
        pieces = len(self.layout.slices(0, 1))
        bandwidth = self._rate.bandwidth
        request_s = REQUEST_S + pieces * pages * PIECE_COST_BYTES / bandwidth
        load = replace(self._load, pages=pages, bandwidth=bandwidth, request_s=request_s)
        if load.io_s / ALIKE <= load.forward_s <= load.io_s * ALIKE:
            load = replace(load, compute_s=load.io_s)
        return plan_groups(load, least_piece_bytes=pieces * self._least_piece_bytes)

    def groups_of_save(self, pages: int) -> tuple[LayerGroup, ...]:
        """For a save, the mirror: what is left to be written when the forward ends is as little as what a load begins with."""
        if self._groups is not None:
            return self._groups
        layers = self.layout.layers
        return tuple(
            LayerGroup(layers - group.last, layers - group.first) for group in reversed(self.groups(pages))
        )

    def learn(self, pages: int, ranges: Sequence[Sequence[ByteRange]], seconds: float) -> None:
        """So many pages moved in so many seconds."""
        page_bytes = self.layout.record_bytes + sum(map(len, ranges)) * PIECE_COST_BYTES
        self._rate.add(pages * page_bytes, seconds - len(ranges) * REQUEST_S)

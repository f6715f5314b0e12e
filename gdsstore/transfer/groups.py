"""Which layers a layer-wise load fetches together, so that the forward starts early and then never waits again.

The model: groups come one after the other, each takes `request_s` plus its bytes over the bandwidth; the forward computes the
layers in order, and begins a group when it has come and the groups before it are computed. Arithmetic alone; nothing is moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gdsstore.errors import ArgumentError
from gdsstore.sizes import KiB

LEAST_PIECE_BYTES = 128 * KiB  # of a page, in one request: below it drives get slow and cuFile bounces
SLACKS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)  # of the larger of I/O and compute, that a plan may be late
# Drives drift fourfold within seconds. A group of most layers would be right for the bandwidth that was measured, and
# hold back the forward once the drive is faster.
LARGEST_SHARE = 4
WORTH = 0.99  # a larger first group must end the forward sooner by that much


class LayerGroup(NamedTuple):
    """Layers `first` (included) to `last` (not included)."""

    first: int
    last: int

    @property
    def layers(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """What is to be loaded, and what was measured. Raises ArgumentError for numbers that make no load."""

    layers: int
    pages: int
    layer_bytes: int  # of one layer of one page, as one contiguous piece
    bandwidth: float  # bytes a second
    request_s: float = 0.0  # what a group takes besides its bytes
    compute_s: float | None = None  # of one layer, for the tokens that are computed; None: not known

    def __post_init__(self) -> None:
        for name in ("layers", "pages", "layer_bytes", "bandwidth"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ArgumentError(f"{name} must be above 0", given=getattr(self, name))
        for name, value in (("request_s", self.request_s), ("compute_s", self.compute_s)):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ArgumentError(f"{name} must be a number of seconds, 0 or more", given=value)

    @property
    def io_s(self) -> float:
        """Seconds that the bytes of one layer take."""
        return self.layer_bytes * self.pages / self.bandwidth

    @property
    def forward_s(self) -> float:
        """Seconds that the forward computes one layer. Where it is not known: as long as the I/O takes, since groups that suit this
        case do well in all others."""
        return self.io_s + self.request_s / self.layers if self.compute_s is None else self.compute_s


def plan_groups(load: LayerLoad, *, least_piece_bytes: int = LEAST_PIECE_BYTES) -> tuple[LayerGroup, ...]:
    """Groups that hold every layer once, in order.

    The forward ends within 1.05 x max(I/O, compute) + the first group, by the model above. Every group has at least
    `least_piece_bytes` of each page, or all layers.
    """
    least = min(load.layers, -(-least_piece_bytes // load.layer_bytes))
    best: tuple[int, ...] = (load.layers,)
    best_s = _finish_s(load, best)
    for first in _first_sizes(least, load.layers):
        if first * load.io_s + load.request_s + load.layers * load.forward_s >= best_s:
            break  # the forward cannot begin in time any more
        sizes = next((found for slack in SLACKS if (found := _fill(load, first, least, slack))), None)
        if sizes is None:
            continue
        took_s = _finish_s(load, sizes)
        if took_s < best_s * (WORTH if best != (load.layers,) else 1.0):
            best, best_s = sizes, took_s
    ends = [sum(best[: i + 1]) for i in range(len(best))]
    return tuple(LayerGroup(end - size, end) for end, size in zip(ends, best, strict=True))


def checked_groups(groups: Sequence[LayerGroup], layers: int) -> tuple[LayerGroup, ...]:
    """`groups`, if they hold layers 0 to `layers` once, in order. Raises ArgumentError where they do not."""
    found = tuple(LayerGroup(*group) for group in groups)
    ends = [0, *(group.last for group in found)]
    in_order = all(group.first == end and group.layers > 0 for group, end in zip(found, ends, strict=False))
    if not in_order or ends[-1] != layers:
        raise ArgumentError("layer groups must hold every layer once, in order", groups=found, layers=layers)
    return found


def finish_s(load: LayerLoad, groups: Sequence[LayerGroup]) -> float:
    """Seconds until the forward ends, by the model above."""
    return _finish_s(load, [group.layers for group in groups])


def _finish_s(load: LayerLoad, sizes: Sequence[int]) -> float:
    arrived_s = computed_s = 0.0
    for size in sizes:
        arrived_s += load.request_s + size * load.io_s
        computed_s = max(arrived_s, computed_s) + size * load.forward_s
    return computed_s


def _first_sizes(least: int, layers: int) -> Iterator[int]:
    size = least
    while size <= _largest(least, layers) and size < layers:
        yield size
        size += max(1, size // 4)


def _largest(least: int, layers: int) -> int:
    return max(least, layers // LARGEST_SHARE)


def _fill(load: LayerLoad, first: int, least: int, slack: float) -> tuple[int, ...] | None:
    """The sizes of groups, each as large as it can be while the forward still ends in time; None where that cannot be."""
    fixed_s, io_s, forward_s = load.request_s, load.io_s, load.forward_s
    first_s = fixed_s + first * io_s
    most_s = max(fixed_s + load.layers * io_s, load.layers * forward_s)
    end_s = first_s + (1.0 + slack) * most_s
    sizes, done, arrived_s = [first], first, first_s
    while done < load.layers:
        left = load.layers - done
        # What comes with this group has all layers that are left to be computed behind it.
        spare_s = end_s - arrived_s - fixed_s - left * forward_s
        # A hair more, as what fits exactly must not fail by the rounding of floats.
        fits = int(min(left, max(0.0, spare_s / io_s + 1e-9)))
        size = min(fits, _largest(least, load.layers))
        if 0 < left - size < least:  # not a last group that is too small
            size = left if fits == left else left - least
        if size < least:
            return None
        sizes.append(size)
        done += size
        arrived_s += fixed_s + size * io_s
    return tuple(sizes)

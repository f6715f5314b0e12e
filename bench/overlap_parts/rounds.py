"""The rounds: I/O alone, the forward alone, and both at once, in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gdsstore.bound import BoundNamespace
from gdsstore.errors import GdsStoreError
from gdsstore.transfer.results import LoadResult
from overlap_parts.destinations import U8, Destination
from overlap_parts.forward import Forward, forward_alone
from overlap_parts.sizes import LAYOUT

LIMIT = 1.05


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. `ratio`: of the rounds' own, (total - first group) / max(I/O, forward); at most LIMIT is wanted."""

    destination: str
    pages: int
    factor: float
    io_s: float
    forward_s: float
    first_group_s: float
    total_s: float
    ratio: float
    meets: bool
    groups: int
    io_gbps: float
    ratios: tuple[float, ...]


class _Sample(NamedTuple):
    io_s: float
    forward_s: float
    first_group_s: float
    total_s: float
    groups: int

    @property
    def ratio(self) -> float:
        return (self.total_s - self.first_group_s) / max(self.io_s, self.forward_s)


def measure(
    namespace: BoundNamespace, destination: Destination, keys: U8, factors: Sequence[float], rounds: int
) -> list[Row]:
    """`rounds`, after a load of each kind that does not count, of which every byte is compared. Raises GdsStoreError for a page
    that is missing or wrong."""
    _compare(namespace, destination, keys)
    taken: list[list[_Sample]] = [[] for _ in factors]
    for number in range(rounds):
        for at in range(len(factors)):
            which = (number + at) % len(factors)
            taken[which].append(_sample(namespace, destination, keys, factors[which]))
    return [_row(destination.name, len(keys), *each) for each in zip(factors, taken, strict=True)]


def _sample(namespace: BoundNamespace, destination: Destination, keys: U8, factor: float) -> _Sample:
    pages = destination.pages(len(keys))
    start = time.perf_counter()
    _check(namespace.load(keys, pages).result())
    io_s = time.perf_counter() - start
    layer_s = factor * io_s / LAYOUT.layers
    forward_s = forward_alone(layer_s)
    forward = Forward(len(keys), layer_s)
    start = time.perf_counter()
    future = namespace.load_layers(keys, pages, forward.on_layers, compute_s_per_layer=layer_s)
    _check(future.result())
    end = max(time.perf_counter(), forward.end())
    return _Sample(io_s, forward_s, forward.arrived[0] - start, end - start, len(forward.groups))


def _compare(namespace: BoundNamespace, destination: Destination, keys: U8) -> None:
    _check(namespace.load(keys, destination.pages(len(keys))).result())
    destination.blank(len(keys))
    forward = Forward(len(keys), 0.0)
    _check(namespace.load_layers(keys, destination.pages(len(keys)), forward.on_layers).result())
    wrong = destination.wrong(keys)
    if wrong:
        raise GdsStoreError("pages were loaded that do not hold what they must", wrong=wrong)


def _check(result: LoadResult) -> None:
    if not result.all_ok:
        raise GdsStoreError(f"the bench could not load all pages: {result.reasons()}")


def _row(destination: str, pages: int, factor: float, taken: Sequence[_Sample]) -> Row:
    io_s, forward_s, first_s, total_s, groups = (
        float(np.median(values)) for values in zip(*taken, strict=True)
    )
    ratios = [each.ratio for each in taken]
    ratio = float(np.median(ratios))
    return Row(
        destination,
        pages,
        factor,
        io_s=round(io_s, 5),
        forward_s=round(forward_s, 5),
        first_group_s=round(first_s, 5),
        total_s=round(total_s, 5),
        ratio=round(ratio, 3),
        meets=ratio <= LIMIT,
        groups=int(groups),
        io_gbps=round(pages * LAYOUT.page_bytes / io_s / 1e9, 3),
        ratios=tuple(round(each, 3) for each in ratios),
    )

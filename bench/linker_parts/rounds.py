"""Restores beside the raw ceiling and beside a forward, and the peers' loads of as many pages, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from hicache_parts.contenders import Contender
from hicache_parts.pool import HostPages
from hicache_parts.rounds import Ceiling, Rng, as_names, check_loaded, new_keys

from gdsstore.engines.base import Op
from gdsstore.errors import GdsStoreError
from linker_parts.device import U8, Device
from linker_parts.restore import Restore, forward_alone, restore
from linker_parts.sizes import LAYERS, PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. `ratio`: of the rounds' own ratios, the ceiling's seconds by the restore's; `copy_ratio`: the same
    with the seconds of the copies, `copy_s`, added to the ceiling's. `queued_s`: for which threads waited for a core, all together.
    """

    pages: int
    gbps: float
    ceiling_gbps: float
    ratio: float
    first_layer_s: float
    total_s: float
    scheduler_us_per_page: float
    copy_s: float
    copy_ratio: float
    cpu_s_per_gb: float
    queued_s: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """A restore beside a forward that takes `factor` times as long as the restore alone. Medians; `to_compute` and `to_slower` of
    the rounds' own: total by the forward alone, and by the slower of restore and forward."""

    pages: int
    factor: float
    io_s: float
    forward_s: float
    first_layer_s: float
    total_s: float
    to_compute: float
    to_slower: float


@dataclass(frozen=True, slots=True)
class Peer:
    """Medians. HiCache's load from storage into host memory, which is as far as its storage goes: a copy to the device follows."""

    backend: str
    pages: int
    gbps: float
    ceiling_gbps: float
    ratio: float


@dataclass(slots=True)
class _Taken:
    alone: list[Restore] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    beside: dict[float, list[tuple[float, float, float, float]]] = field(default_factory=dict)


def measure(
    device: Device,
    keys: U8,
    ceiling: Ceiling,
    copy: Callable[[npt.NDArray[np.intp]], float],
    factors: Sequence[float],
    rounds: int,
    rng: Rng,
) -> tuple[Row, list[Overlap]]:
    """`rounds`, after one that does not count. `copy`: see `copy_alone`; takes the places of the pages.

    Raises GdsStoreError for a page that is missing or wrong.
    """
    names = as_names(keys)
    taken = _Taken(beside={factor: [] for factor in factors})
    for number in range(rounds + 1):
        place = rng.permutation(len(keys))
        device.blank()
        alone = restore(device, names, place, 0.0)
        wrong = device.wrong(keys, place)
        if wrong:
            raise GdsStoreError("pages were restored that do not hold what they must", wrong=wrong)
        ceiling_s = ceiling.run(Op.READ, PAGE_BYTES, len(keys), rng)
        copy_s = copy(place)
        for factor in factors:
            io_s = restore(device, names, place, 0.0).total_s
            layer_s = factor * io_s / LAYERS
            forward_s = forward_alone(layer_s)
            both = restore(device, names, place, layer_s)
            if number:
                taken.beside[factor].append((io_s, forward_s, both.first_layer_s, both.total_s))
        if number:
            taken.alone.append(alone)
            taken.ceiling.append(ceiling_s)
            taken.copies.append(copy_s)
    return _row(len(keys), taken), [_overlap(len(keys), *each) for each in taken.beside.items()]


def measure_peers(
    contenders: Sequence[Contender], pages: HostPages, ceiling: Ceiling, rounds: int, rng: Rng
) -> list[Peer]:
    """As `measure`, of HiCache's backends on a host pool."""
    keys = new_keys(pages.count, rng)
    names, place = as_names(keys), np.arange(pages.count)
    pages.fill(keys, place)
    for each in contenders:
        if not each.save(names, pages.indices(place)):
            raise GdsStoreError(f"{each.name} could not save all pages")
    taken: dict[str, list[tuple[float, float]]] = {each.name: [] for each in contenders}
    for number in range(rounds + 1):
        place = rng.permutation(pages.count)
        indices = pages.indices(place)
        for each in contenders:
            each.before_load(names)
            pages.blank()
            seconds, loaded = _timed(partial(each.load, names, indices))
            check_loaded(each.name, loaded, keys, place, pages)
            ceiling_s = ceiling.run(Op.READ, pages.page_bytes, pages.count, rng)
            if number:
                taken[each.name].append((seconds, ceiling_s))
    return [_peer(name, pages.count, *np.array(times).T) for name, times in taken.items()]


def _timed(call: Any) -> tuple[float, Any]:
    start = perf_counter()
    result = call()
    return perf_counter() - start, result


def _gbps(pages: int, seconds: Any) -> float:
    return round(float(np.median(pages * PAGE_BYTES / np.asarray(seconds))) / 1e9, 3)


def _row(pages: int, taken: _Taken) -> Row:
    total, first, scheduler, used, queued = np.array([(*each[:3], *each.cpu) for each in taken.alone]).T
    ceiling, copies = np.array(taken.ceiling), np.array(taken.copies)
    return Row(
        pages,
        _gbps(pages, total),
        _gbps(pages, ceiling),
        ratio=_median(ceiling / total, 3),
        first_layer_s=_median(first),
        total_s=_median(total),
        scheduler_us_per_page=_median(scheduler / pages * 1e6, 2),
        copy_s=_median(copies),
        copy_ratio=_median((ceiling + copies) / total, 3),
        cpu_s_per_gb=_median(used / (pages * PAGE_BYTES / 1e9), 3),
        queued_s=_median(queued),
        rounds=len(total),
    )


def _median(values: Any, digits: int = 5) -> float:
    return round(float(np.median(values)), digits)


def _overlap(pages: int, factor: float, times: list[tuple[float, float, float, float]]) -> Overlap:
    io, forward, first, total = np.array(times).T
    return Overlap(
        pages,
        factor,
        io_s=_median(io),
        forward_s=_median(forward),
        first_layer_s=_median(first),
        total_s=_median(total),
        to_compute=_median(total / forward, 3),
        to_slower=_median(total / np.maximum(io, forward), 3),
    )


def _peer(name: str, pages: int, seconds: Any, ceiling: Any) -> Peer:
    return Peer(
        name,
        pages,
        _gbps(pages, seconds),
        _gbps(pages, ceiling),
        _median(ceiling / seconds, 3),
    )

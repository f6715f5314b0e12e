"""Batches saved and loaded by every backend in turn, each beside the raw ceiling, with every loaded page compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op
from gdsstore.errors import GdsStoreError
from hicache_parts.contenders import Contender
from hicache_parts.pool import U8, PageMemory

SAVE, LOAD = "save", "load"
DIRECTIONS = (SAVE, LOAD)

Rng = np.random.Generator


class Pages(PageMemory, Protocol):
    def indices(self, place: npt.NDArray[np.intp]) -> Any: ...


class Ceiling(Protocol):
    def run(self, op: Op, block_bytes: int, count: int, rng: Rng) -> float:
        """Seconds to move `count` blocks."""


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. `ratio`: of the rounds' own ratios, the ceiling's seconds by the backend's."""

    page_bytes: int
    direction: str
    backend: str
    gbps: float
    ceiling_gbps: float
    ratio: float
    cpu_s_per_gb: float
    rounds: int


@dataclass(slots=True)
class _Samples:
    backend_s: list[float] = field(default_factory=list)
    ceiling_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def take_turns(
    contenders: Sequence[Contender], pages: Pages, ceiling: Ceiling, rounds: int, rng: Rng
) -> list[Row]:
    """`rounds`, and one before them that does not count. Raises GdsStoreError for a page that is missing or wrong."""
    samples: dict[tuple[str, str], _Samples] = {}
    for number in range(rounds + 1):
        if number <= 1:  # what came before compiled code and made files
            samples = {(way, each.name): _Samples() for way in DIRECTIONS for each in contenders}
        order = [contenders[(number + at) % len(contenders)] for at in range(len(contenders))]
        _round(order, pages, ceiling, samples, rng)
    batch_bytes = pages.count * pages.page_bytes
    return [_row(pages.page_bytes, batch_bytes, *which, taken) for which, taken in samples.items()]


def _round(
    order: Sequence[Contender],
    pages: Pages,
    ceiling: Ceiling,
    samples: dict[tuple[str, str], _Samples],
    rng: Rng,
) -> None:
    keys = new_keys(pages.count, rng)
    names = as_names(keys)
    place = rng.permutation(pages.count)
    indices = pages.indices(place)
    pages.fill(keys, place)
    for each in order:
        taken = samples[SAVE, each.name]
        if not _timed(taken, partial(each.save, names, indices)):
            raise GdsStoreError(f"{each.name} could not save all pages", page_bytes=pages.page_bytes)
        taken.ceiling_s.append(ceiling.run(Op.WRITE, pages.page_bytes, pages.count, rng))
    place = rng.permutation(pages.count)
    indices = pages.indices(place)
    for each in order:
        taken = samples[LOAD, each.name]
        each.before_load(names)
        pages.blank()
        check_loaded(each.name, _timed(taken, partial(each.load, names, indices)), keys, place, pages)
        taken.ceiling_s.append(ceiling.run(Op.READ, pages.page_bytes, pages.count, rng))


def check_loaded(name: str, loaded: int, keys: U8, place: npt.NDArray[np.intp], pages: PageMemory) -> None:
    """Raises GdsStoreError for a page that is missing or wrong."""
    wrong = pages.wrong(keys, place)
    if loaded != len(keys) or wrong:
        raise GdsStoreError(
            f"{name} loaded {loaded} of {len(keys)} pages, and {wrong} do not hold what they must",
            page_bytes=pages.page_bytes,
        )


def new_keys(count: int, rng: Rng) -> U8:
    return rng.integers(0, 256, (count, 32), dtype=np.uint8)


def as_names(keys: Iterable[U8]) -> list[str]:
    """Keys as SGLang writes them: 64 hex digits."""
    return [key.tobytes().hex() for key in keys]


def _timed(samples: _Samples, call: Callable[[], Any]) -> Any:
    cpu, start = time.process_time(), time.perf_counter()
    result = call()
    samples.backend_s.append(time.perf_counter() - start)
    samples.cpu_s.append(time.process_time() - cpu)
    return result


def _row(page_bytes: int, batch_bytes: int, direction: str, name: str, samples: _Samples) -> Row:
    backend, ceiling, cpu = (
        np.array(values) for values in (samples.backend_s, samples.ceiling_s, samples.cpu_s)
    )
    return Row(
        page_bytes,
        direction,
        name,
        round(float(np.median(batch_bytes / backend)) / 1e9, 3),
        round(float(np.median(batch_bytes / ceiling)) / 1e9, 3),
        round(float(np.median(ceiling / backend)), 3),
        round(float(np.median(cpu)) / (batch_bytes / 1e9), 3),
        len(backend),
    )

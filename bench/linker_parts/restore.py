"""A restore as a batch sees it: look-up, load, start, a forward that waits layer by layer, finish."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdsstore.errors import GdsStoreError
from linker_parts.costs import Cpu
from linker_parts.device import Device
from linker_parts.sizes import LAYERS

_rids = itertools.count()


class Restore(NamedTuple):
    """`scheduler_s`: what it takes of the scheduler's thread: the time of look-up, load and start, which wait for nothing, and the
    CPU time of finish. `cpu`: of the whole process."""

    total_s: float
    first_layer_s: float
    scheduler_s: float
    cpu: Cpu


def restore(device: Device, names: list[str], place: npt.NDArray[np.intp], layer_s: float) -> Restore:
    """Load pages to the places `place`, beside a forward that takes `layer_s` a layer; 0: none.

    Raises GdsStoreError where a page is missing or damaged.
    """
    linker, rid = device.linker, f"bench-{next(_rids)}"
    asked, wanted = device.transfer(names), device.transfer(names, place)
    before = Cpu.now()
    start = time.perf_counter()
    lengths = linker.lookup(rid, asked)
    queued = linker.load(rid, wanted)
    index = linker.start_layer_wise_loading()
    scheduler_s = time.perf_counter() - start
    if lengths[-1:] != [len(names)] or not queued:
        raise GdsStoreError("the linker does not find all pages", found=lengths[-1:], pages=len(names))
    counter = linker.layer_done_counter
    counter.set_consumer(index)
    counter.wait_until(0)
    first_layer_s = time.perf_counter() - start
    end = 0.0
    for layer in range(LAYERS):
        counter.wait_until(layer)
        end = compute(max(end, time.perf_counter()), layer_s)
    cpu = time.thread_time()
    landed = linker.finish_layer_wise_loading(index)
    scheduler_s += time.thread_time() - cpu
    total_s = max(end, time.perf_counter()) - start
    if not landed:
        raise GdsStoreError("the linker did not load all pages")
    return Restore(total_s, first_layer_s, scheduler_s, Cpu.now().since(before))


def forward_alone(layer_s: float) -> float:
    """Seconds that the forward takes when nothing is loaded."""
    start = end = time.perf_counter()
    for _ in range(LAYERS):
        end = compute(end, layer_s)
    return max(end, time.perf_counter()) - start


def compute(start: float, layer_s: float) -> float:
    """Sleep for a layer that begins at `start`; when it ends. Sleeps are late by more than some layers take, so that clocks are
    kept apart."""
    end = start + layer_s
    left = end - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return end

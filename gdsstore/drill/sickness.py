"""One fault of the drives: healthy for a while, then sick, then healthy again, with calls all the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gdsstore
from gdsstore.config import AutoOff
from gdsstore.drill.drives import SICK, Drives
from gdsstore.drill.plan import MODEL, PAGE_BYTES, PROMPT_PAGES, PROMPTS, DrillFault, store_config
from gdsstore.drill.report import FaultReport
from gdsstore.drill.traffic import Traffic, new_buffer, random_keys
from gdsstore.errors import StoreError
from gdsstore.replay.truth import U8
from gdsstore.volume.health import Breaker
from gdsstore.waiting import Deadline, pause

HEALTHY_S = 1.0  # before the fault
LEFT_ALONE_WITHIN_S = 10.0  # a drive that hangs or errs
BACK_WITHIN_S = 15.0  # tries are made 1, 2, 4, ... s after each other
CLOSE_S = 10.0
LOOK_S = 0.01
MUST_BE_LEFT_ALONE = (DrillFault.HANG, DrillFault.ERRORS)


def fall_ill(path: Path, fault: DrillFault, seconds: float) -> FaultReport:
    """Go through one fault with a new store in `path`.

    Raises what `gdsstore.open` raises, and StoreError where the store does not even work while the drives are well.
    """
    report = FaultReport(fault)
    began_s = time.monotonic()
    config = store_config()
    drives = Drives(path, config, fault)
    store = gdsstore.open(drives.paths, config=config, engine=drives.engine)
    try:
        pages = store.namespace(model=MODEL, layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        prompts = _save_prompts(pages)
        traffic = Traffic(pages, prompts)
        report.seen = traffic.seen
        traffic.start()
        try:
            pause(min(HEALTHY_S, seconds))
            _sick(store, drives, report, seconds)
            _well_again(store, drives, report)
        finally:
            drives.heal()
            traffic.stop()
        report.pages_lost = _lost(traffic, prompts)
    finally:
        drives.heal()
        store.close(CLOSE_S)
    report.injected = drives.injected
    report.seconds = time.monotonic() - began_s
    return report


def _sick(store: gdsstore.Store, drives: Drives, report: FaultReport, seconds: float) -> None:
    """For `seconds`, and on until the drive is left alone where it must be."""
    fault = report.fault
    must = fault in MUST_BE_LEFT_ALONE and store.config.drive_breaker is AutoOff.AUTO
    began_s = time.monotonic()
    drives.sick = True
    most_s = max(seconds, LEFT_ALONE_WITHIN_S)
    least, most = Deadline(seconds), Deadline(most_s)
    while not least.passed or (must and report.left_alone_s is None and not most.passed):
        if report.left_alone_s is None and _left_alone(store):
            report.left_alone_s = time.monotonic() - began_s
        pause(LOOK_S)
    if must and report.left_alone_s is None:
        report.problems.append(f"the drive was still used {most_s:g} s after it fell ill")


def _well_again(store: gdsstore.Store, drives: Drives, report: FaultReport) -> None:
    """Heal the drives, and see the store use them again."""
    began_s = time.monotonic()
    drives.heal()
    if not _until(lambda: not _left_alone(store), BACK_WITHIN_S):
        report.problems.append(f"the drive was not used again {BACK_WITHIN_S:g} s after it was well")
    elif report.left_alone_s is not None:
        report.back_s = time.monotonic() - began_s


def _left_alone(store: gdsstore.Store) -> bool:
    return any(volumes[SICK].breaker is not Breaker.CLOSED for volumes in store.health.values())


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = Deadline(seconds)
    while not true():
        if deadline.passed:
            return False
        pause(LOOK_S)
    return True


def _save_prompts(pages: gdsstore.BoundNamespace) -> list[U8]:
    """Save what is to be there all the time. Raises StoreError where that does not go well."""
    rng = np.random.default_rng(0)
    prompts = [random_keys(rng, PROMPT_PAGES) for _ in range(PROMPTS)]
    before = Traffic(pages, prompts)
    memory = new_buffer(PROMPT_PAGES)
    for keys in prompts:
        result, memory = before.save(keys, memory)
        if result is None or not result.all_ok:
            reasons = {} if result is None else result.reasons()
            raise StoreError("the store does not save pages though no fault was injected yet", **reasons)
    return prompts


def _lost(traffic: Traffic, prompts: list[U8]) -> int:
    """Pages that were saved before the fault and do not load after it."""
    lost = 0
    memory = new_buffer(PROMPT_PAGES)
    for keys in prompts:
        result, memory = traffic.load(keys, memory)
        lost += len(keys) if result is None else int((~result.ok).sum())
    return lost

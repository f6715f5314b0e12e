"""A process that saves is killed, again and again; each time the store is opened, and everything that it was told of loaded."""

from __future__ import annotations

import contextlib
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import gdsstore
from gdsstore.drill.plan import (
    CAPACITY_BYTES,
    MODEL,
    PAGE_BYTES,
    PROMPT_PAGES,
    DrillFault,
    store_config,
)
from gdsstore.drill.report import FaultReport
from gdsstore.drill.traffic import Traffic, new_buffer
from gdsstore.drill.victim import prompt_keys
from gdsstore.errors import StoreError
from gdsstore.waiting import Deadline

ROUNDS = 3
START_S = 60.0  # until the victim has saved its first prompt
MOST_PROMPTS = CAPACITY_BYTES // (2 * PAGE_BYTES * PROMPT_PAGES)  # half of it: nothing is to be reclaimed


def kill_and_reopen(path: Path, seconds: float) -> FaultReport:
    """Kill a process `ROUNDS` times, each at most `seconds` after it began to save.

    Raises StoreError where it does not get to save anything, and what `gdsstore.open` raises.
    """
    report = FaultReport(DrillFault.KILL)
    began_s = time.monotonic()
    told: list[int] = []
    first = 0
    for number in range(ROUNDS):
        share = random.Random(number).uniform(0.3, 1.0) / ROUNDS  # somewhere, but the same each time
        told += _one_life(path, first, max(1, int(share * MOST_PROMPTS)), share * seconds)
        report.injected += 1
        first = max(told) + 100  # prompts that it was not told of may be there or not
        killed_s = time.monotonic()
        _look(path, told, report, killed_s)
    report.seconds = time.monotonic() - began_s
    return report


def _one_life(path: Path, first: int, most: int, seconds: float) -> list[int]:
    """Let a process save for `seconds` or until it told of `most` prompts, kill it, and return the numbers of those."""
    raw = b""
    log = path.with_name("victim.log")
    with log.open("wb") as errors, _victim(path, first, errors) as victim:
        assert victim.stdout is not None
        channel = victim.stdout.fileno()
        start, end = Deadline(START_S), None
        while end is None or not end.passed:
            if start.passed and end is None:
                raise StoreError("the process that is to be killed saves nothing", seconds=START_S)
            if select.select([channel], [], [], 0.01)[0]:
                part = os.read(channel, 1 << 16)
                if not part:
                    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                    raise StoreError(f"the process that is to be killed ended by itself: {last}")
                raw += part
                end = end or Deadline(seconds)
                if raw.count(b"\n") >= most:
                    break
        victim.kill()
        victim.wait(START_S)
        while part := os.read(channel, 1 << 16):  # what it was told before it died
            raw += part
    lines = raw.split(b"\n")[:-1]
    return [int(line) for line in lines]


@contextlib.contextmanager
def _victim(path: Path, first: int, errors: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gdsstore.drill.victim", str(path), str(first)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(START_S)
        if process.stdout is not None:
            process.stdout.close()


def _look(path: Path, told: list[int], report: FaultReport, killed_s: float) -> None:
    """Open the store, and load every prompt that it had said was saved."""
    with gdsstore.open(path, config=store_config()) as store:
        pages = store.namespace(model=MODEL, layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        report.back_s = max(report.back_s or 0.0, time.monotonic() - killed_s)
        traffic = Traffic(pages, ())
        traffic.seen = report.seen
        memory, lost = new_buffer(PROMPT_PAGES), 0
        for number in told:
            result, memory = traffic.load(prompt_keys(number), memory)
            lost += PROMPT_PAGES if result is None else int((~result.ok).sum())
        report.pages_lost = max(report.pages_lost, lost)
        report.seen.pages_saved = len(told) * PROMPT_PAGES

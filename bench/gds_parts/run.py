"""The whole benchmark: opens who takes part for each number of submitters, and puts the result together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from gds_parts.dram import DramTraffic, open_dram
from gds_parts.gpu import Gpu
from gds_parts.lineup import LINEUP
from gds_parts.machine import Machine, this_machine
from gds_parts.reference import FIO, GDSIO_BOUNCE, GDSIO_DIRECT, fio, gdsio
from gds_parts.rounds import Missing, Seats, one_line
from gds_parts.rows import DIRECT_SHARE, EVEN, Row, Verdict, make_row, verdicts
from gds_parts.sizes import Cell, Sizes
from gds_parts.target import Target
from gds_parts.turns import Contender
from gdsstore.errors import EngineError

SCHEMA, SCHEMA_VERSION = "gdsstore.bench.gds_vs_bounce", 1

NOTES = (
    "submitters: records in flight. Every engine is made to have at most so many under way, and given a turn's records as one "
    "plan (GB/s, CPU, DRAM); fio gets as much queue depth, gdsio as many threads",
    "a bounce engine cuts records of more than 4 MiB, and has no more under way than its host memory holds; kvikio in compat mode "
    "has at most 32 in flight",
    "latency: plans of as many records as there are submitters, one after the other, each from its submission until all of it is "
    "there; p50 and p99 over all rounds. fio's is of a single record, medians of its rounds; gdsio tells none",
    "each round has a turn of every contender, in an order drawn anew, after a round that does not count and in which every byte "
    "was compared; GB/s and CPU are medians. The programs take part in the first rounds only",
    "paths: the bytes as the engines counted them, whatever the contender's name asks for. Host rows end in host memory: their "
    "bytes still have to get to the GPU",
    "CPU: user and system seconds of the whole process; what the kernel's own threads take is not in it",
    "the file is fully written first, all I/O is O_DIRECT, places are random. Writes are not synced",
    f"a row is of the direct path with {DIRECT_SHARE:.0%} of its bytes direct; ratios are medians of the rounds' own, and within "
    f"{EVEN:.0%} they are even",
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    machine: Machine
    gpu: Gpu
    sizes: Sizes
    date: str
    dram: str | None  # the counter's name
    no_dram: str | None  # why there is none
    rows: list[Row]
    missing: list[Missing]

    @property
    def title(self) -> str:
        if self.gpu.kind == "simulated":
            return "SIMULATED GPU: says nothing about speed (cuFile against a bounce through host memory)"
        if self.gpu.kind == "none":
            return f"NO GPU: host memory only, {self.machine.drive}"
        return f"cuFile against a bounce through host memory: {self.machine.gpu_name}, {self.machine.drive}"

    @property
    def verdicts(self) -> list[Verdict]:
        return verdicts(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "title": self.title,
            "date": self.date,
            "gpu": asdict(self.gpu),
            "machine": self.machine.to_dict(),
            "parameters": asdict(self.sizes),
            "dram": {"counter": self.dram, "missing": self.no_dram},
            "rows": [asdict(row) for row in self.rows],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "missing": [asdict(each) for each in self.missing],
            "notes": list(NOTES),
        }


def run(directory: Path, sizes: Sizes, gpu: Gpu, say: Say) -> Measured:
    """Measure on the drive of `directory`, which the caller removes. Raises GdsStoreError where that cannot be used at all."""
    say("looking at the machine")
    machine = this_machine(directory)
    counter = open_dram()
    dram, no_dram = (None, counter) if isinstance(counter, str) else (counter, None)
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    missing: list[Missing] = []
    out = {each.name: gpu.why for each in LINEUP if each.memory == "device" and gpu.kind == "none"}
    say("writing the file")
    with Target(directory, sizes.file_bytes) as target, _engines_quiet():
        programs = _programs(target, gpu, out)
        missing += [Missing(name, None, "", reason) for name, reason in out.items()]
        for submitters in sizes.submitters:
            say(f"{submitters} submitters: opening")
            opened, refused = _open(sizes, submitters, target, dram, set(out))
            missing += refused
            seats = Seats([*opened, *programs], submitters)
            try:
                for cell in sizes.cells(submitters):
                    say(str(cell))
                    rows += _rows(seats, cell, sizes.rounds, rng)
            finally:
                seats.close()
            missing += seats.missing
            for name in seats.hung:
                out[name] = (
                    "a call that hung may still be under way, so it was not tried with more submitters"
                )
                missing.append(Missing(name, None, "", out[name]))
            programs = [each for each in programs if each.name not in out]
    return Measured(
        machine,
        gpu,
        sizes,
        datetime.now(UTC).isoformat(timespec="seconds"),
        None if dram is None else dram.source,
        no_dram,
        rows,
        missing,
    )


def _rows(seats: Seats, cell: Cell, rounds: int, rng: np.random.Generator) -> list[Row]:
    taken = seats.measure(cell, rounds, rng)
    return [make_row(each.name, each.memory, each.latency_of, cell, taken[each.name]) for each in seats.open]


def _open(
    sizes: Sizes, submitters: int, target: Target, dram: DramTraffic | None, out: set[str]
) -> tuple[list[Contender], list[Missing]]:
    """The engines' contenders, and those that cannot be had."""
    opened: list[Contender] = []
    refused = []
    for maker in LINEUP:
        if maker.name in out:
            continue
        try:
            opened.append(maker.open(submitters, sizes.memory_bytes(submitters), target, dram))
        except Exception as error:  # whatever it is: it cannot run here, and the report says so
            refused.append(Missing(maker.name, submitters, "", one_line(error)))
    return opened, refused


def _programs(target: Target, gpu: Gpu, out: dict[str, str]) -> list[Contender]:
    """Those that are installed; why others are not goes into `out`."""
    programs: list[Contender] = []
    wanted: dict[str, Callable[[], Contender]] = {
        FIO: lambda: fio(target),
        GDSIO_DIRECT: lambda: gdsio(target, GDSIO_DIRECT),
        GDSIO_BOUNCE: lambda: gdsio(target, GDSIO_BOUNCE),
    }
    for name, make in wanted.items():
        try:
            if name != FIO and gpu.kind != "real":
                raise EngineError(f"{name} needs a real GPU")
            programs.append(make())
        except EngineError as error:
            out[name] = one_line(error)
    return programs


@contextmanager
def _engines_quiet() -> Iterator[None]:
    """What engines warn of shows in the paths and in what is missing, and is one line there."""
    logger = logging.getLogger("gdsstore")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)

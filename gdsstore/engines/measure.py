"""Measures paths against each other on the user's own volume: a few hundred megabytes, a few seconds, round by round."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np

from gdsstore.engines.base import Op, RangePlan, Transfer
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.paths import Path
from gdsstore.engines.scratch import ScratchFile
from gdsstore.engines.select import Measurement
from gdsstore.errors import ArgumentError, EngineError, GdsStoreError, from_os_error
from gdsstore.layout import ALIGNMENT
from gdsstore.sizes import KiB, MiB, format_size
from gdsstore.waiting import Deadline

SIZES = (256 * KiB, 2 * MiB)
SUBMITTERS = (1, 8)
SCRATCH_SHARE = 8  # the scratch file, and so the largest plan, takes at most an 8th of the bytes
SAMPLE_BYTES, MAX_REPEATS = 2 * MiB, 8  # a smaller plan is timed several times in a row


@dataclass(frozen=True, slots=True)
class Measured:
    """`problems`: why a path has no measurement. `under_way`: a transfer that did not end in time; until it is done the drive
    may write into the staging memory, so that nobody else may use that."""

    measurements: tuple[Measurement, ...]
    problems: Mapping[Path, str]
    under_way: Transfer | None = None

    def usable(self, paths: Sequence[Path]) -> tuple[Path, ...]:
        """Those of `paths` that have no problem; all where each has one, since that tells nothing of any of them."""
        return tuple(path for path in paths if path not in self.problems) or tuple(paths)


class _Cell(NamedTuple):
    op: Op
    record_bytes: int
    submitters: int

    @property
    def plan_bytes(self) -> int:
        return self.record_bytes * self.submitters

    @property
    def repeats(self) -> int:
        return min(max(SAMPLE_BYTES // self.plan_bytes, 1), MAX_REPEATS)


def measure_paths(
    engines: Mapping[Path, DeviceEngine],
    directory: FilePath,
    address: int,
    staging_bytes: int,
    *,
    sizes: Sequence[int] = SIZES,
    submitters: Sequence[int] = SUBMITTERS,
    budget_s: float = 2.0,
    budget_bytes: int = 256 * MiB,
    deadline_s: float = 10.0,
) -> Measured:
    """Measure every path of `engines`, writing and reading a scratch file in `directory`, which is gone afterwards.

    `address`, `staging_bytes`: device memory that is registered with every engine and that nobody else uses meanwhile; its
    content is overwritten. `sizes`: bytes of a record. `submitters`: ranges in flight at once. What does not fit into the
    staging memory or into an 8th of `budget_bytes` is left out.

    Stops after `budget_s` seconds or `budget_bytes` bytes, the scratch file among them. What is under way then ends within
    `deadline_s` seconds a path, or is given up. Paths take turns, and each figure of one has one of every other beside it.

    A path that fails, or whose bytes went another way, is among the problems; so are all of them where the file cannot be made.
    Raises ArgumentError for sizes that are not multiples of 4 KiB or that do not fit, and nothing else.
    """
    cells = [_Cell(op, size, n) for size in sizes for n in submitters for op in Op]
    if any(cell.plan_bytes <= 0 or cell.record_bytes % ALIGNMENT for cell in cells):
        raise ArgumentError("records are measured in multiples of 4 KiB, one or more at once")
    cells = [cell for cell in cells if cell.plan_bytes <= min(staging_bytes, budget_bytes // SCRATCH_SHARE)]
    if not cells:
        raise ArgumentError(
            "no record fits: give more staging memory, or a larger budget",
            staging_bytes=staging_bytes,
            budget_bytes=budget_bytes,
        )
    file_bytes = budget_bytes // SCRATCH_SHARE // ALIGNMENT * ALIGNMENT
    run = _Run(dict(engines), address, Deadline(budget_s), budget_bytes - file_bytes, deadline_s)
    try:
        with ScratchFile(directory, file_bytes, deadline_s) as file:
            run.measure(cells, file)
    except OSError as error:
        run.drop_all(str(from_os_error(error, "cannot measure in the volume")))
    except GdsStoreError as error:
        run.drop_all(str(error))
    return Measured(tuple(run.measurements()), run.problems, run.under_way)


class _StuckError(EngineError):
    """A transfer did not end in time, so that neither file nor memory can be used any more."""


@dataclass(slots=True)
class _Run:
    """One measuring. `engines`: those that have had no trouble so far."""

    engines: dict[Path, DeviceEngine]
    address: int
    deadline: Deadline
    bytes_left: int
    deadline_s: float
    problems: dict[Path, str] = field(default_factory=dict)
    under_way: Transfer | None = None
    _samples: dict[tuple[_Cell, Path], list[float]] = field(default_factory=dict)  # bytes a second
    _at: int = 0  # in the file

    def measurements(self) -> Iterator[Measurement]:
        for (cell, path), speeds in self._samples.items():
            if path in self.engines:
                yield Measurement(*cell, path, statistics.median(speeds))

    def drop_all(self, why: str) -> None:
        for path in list(self.engines):
            self._drop(path, why)

    def measure(self, cells: Sequence[_Cell], file: ScratchFile) -> None:
        """Raises _StuckError."""
        attached = []
        try:
            for path, engine in list(self.engines.items()):
                with self._its_problem(path):
                    engine.attach(file.fd, file.nbytes)
                    attached.append(engine)
            self._warm_up(cells, file)
            self._rounds(cells, file)
        finally:
            if self.under_way is not None:
                file.keep_open()
            else:
                for engine in attached:
                    engine.detach(file.fd)
                    engine.moved.take(file.fd)  # these are no pages, and the next file may get the number

    def _warm_up(self, cells: Sequence[_Cell], file: ScratchFile) -> None:
        """Threads start and buffers are made."""
        widest = {
            cell.op: cell for cell in sorted(cells, key=lambda cell: (cell.submitters, -cell.record_bytes))
        }
        for path in list(self.engines):
            with self._its_problem(path):
                for cell in widest.values():
                    self._move(path, cell, file, Deadline(self.deadline_s))

    def _rounds(self, cells: Sequence[_Cell], file: ScratchFile) -> None:
        backwards = False
        while True:
            for cell in cells:
                needed = len(self.engines) * cell.repeats * cell.plan_bytes
                if not self.engines or self.deadline.passed or needed > self.bytes_left:
                    return
                for path in sorted(self.engines, reverse=backwards):
                    with self._its_problem(path):
                        self._sample(path, cell, file)
                        self._check_way(path, file)
            backwards = not backwards

    def _sample(self, path: Path, cell: _Cell, file: ScratchFile) -> None:
        deadline = Deadline(self.deadline_s)
        start = time.perf_counter()
        for _ in range(cell.repeats):
            self._move(path, cell, file, deadline)
        seconds = time.perf_counter() - start
        self._samples.setdefault((cell, path), []).append(cell.repeats * cell.plan_bytes / seconds)

    def _move(self, path: Path, cell: _Cell, file: ScratchFile, deadline: Deadline) -> None:
        """Raises EngineError where it failed, _StuckError where it did not end."""
        if self._at + cell.plan_bytes > file.nbytes:
            self._at = 0
        step = np.arange(cell.submitters, dtype=np.int64) * cell.record_bytes
        plan = RangePlan(
            np.full(cell.submitters, file.fd, np.int32),
            self._at + step,
            np.uint64(self.address) + step.astype(np.uint64),
            np.full(cell.submitters, cell.record_bytes, np.int64),
        )
        self._at += cell.plan_bytes
        self.bytes_left -= cell.plan_bytes
        transfer = self.engines[path].submit(cell.op, plan)
        results = transfer.wait(deadline.left_s)
        bad = np.flatnonzero(~results.complete(plan))
        if not len(bad):
            return
        what = f"path {path}: {cell.op.value} of {format_size(cell.record_bytes)}, {cell.submitters} at once"
        if not transfer.done:
            self.under_way = transfer
            raise _StuckError(f"{what}, did not end in {self.deadline_s:g} s")
        code = int(results.errno[bad[0]])
        raise EngineError(f"{what}: {os.strerror(code) if code else 'moved less than asked for'}", errno=code)

    def _check_way(self, path: Path, file: ScratchFile) -> None:
        """Raises EngineError where bytes were counted under another path."""
        moved = self.engines[path].moved.take(file.fd)
        others = sorted({way for (_, way) in moved if way is not path})
        if others:
            raise EngineError(f"path {path}: bytes of it went {', '.join(others)}")

    def _drop(self, path: Path, why: str) -> None:
        del self.engines[path]
        self.problems[path] = why

    @contextlib.contextmanager
    def _its_problem(self, path: Path) -> Iterator[None]:
        """Trouble of one path costs its measurements, not those of others, unless it is stuck."""
        try:
            yield
        except _StuckError:
            raise
        except GdsStoreError as error:
            self._drop(path, str(error))
        except OSError as error:
            self._drop(path, str(from_os_error(error, f"path {path} failed")))

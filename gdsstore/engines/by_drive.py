"""An engine of its own for each drive: one that hangs takes no thread, and no place in a queue, that another one needs."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import I32, I64, Engine, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.files import UNKNOWN, FileTable
from gdsstore.errors import EngineError
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.engines")

Ints = npt.NDArray[np.intp]
LOOK_S = 2e-4  # how often a waiting caller looks at the drives of its plan


def filesystem_of(fd: int) -> Hashable:
    """What tells drives apart, without a look below the filesystem: its device number."""
    return os.fstat(fd).st_dev


class ByDriveEngine(Engine):
    """Moves the ranges of each drive through an engine that `make` gives, and closes them with itself."""

    def __init__(
        self, make: Callable[[], Engine], drive_of: Callable[[int], Hashable] = filesystem_of
    ) -> None:
        """`drive_of` tells the drive of an open file by its descriptor. Raises what `make` raises."""
        self._make, self._drive_of = make, drive_of
        self._engines: list[Engine] = [
            make()
        ]  # the first drive's, whichever that is: what cannot work says so now
        self.name = self._engines[0].name
        self._number: dict[Hashable, int] = {}  # of each drive, in `_engines`
        self._files = FileTable()  # its "size" of a file is one more than the number of its drive
        self._lock = threading.Lock()
        self._closed = False

    def attach(self, fd: int, size: int) -> None:
        drive = self._drive_of(fd)
        with self._lock:
            if self._closed:
                raise EngineError(f"the {self.name} engine is closed: open the store again")
            if drive not in self._number:
                if len(self._number) == len(self._engines):
                    self._engines.append(self._make())
                self._number[drive] = len(self._number)
            number = self._number[drive]
        self._files.add(fd, number + 1)
        try:
            self._engines[number].attach(fd, size)
        except BaseException:
            self._files.discard(fd)
            raise

    def detach(self, fd: int) -> None:
        number = int(self._files.sizes(np.array([fd], np.int32))[0]) - 1
        if number >= 0:
            self._engines[number].detach(fd)
            self._files.discard(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        # With a single drive, and for files that nobody knows, which its engine refuses, there is nothing to tell apart.
        if len(self._number) < 2 or len(plan) == 0:
            return self._engines[0].submit(op, plan)
        found = self._files.sizes(plan.fd)
        number = np.where(found == UNKNOWN, 0, found - 1)
        drives: list[int] = np.unique(number).tolist()
        if len(drives) == 1:
            return self._engines[drives[0]].submit(op, plan)
        parts: list[tuple[Ints, Transfer]] = []
        refused: list[Ints] = []
        for drive in drives:
            index = np.flatnonzero(number == drive)
            try:
                parts.append((index, self._engines[drive].submit(op, plan.take(index))))
            except EngineError as error:
                log.error("%d ranges fail: %s", len(index), error)
                refused.append(index)
        if not parts:
            raise EngineError(f"the {self.name} engines refused a whole plan; see the log")
        return _SplitTransfer(len(plan), parts, refused)

    def close(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._lock:
            self._closed = True
        for engine in self._engines:
            engine.close(deadline.left_s)


class _SplitTransfer(Transfer):
    def __init__(self, n: int, parts: list[tuple[Ints, Transfer]], refused: list[Ints]) -> None:
        self._parts = parts
        self._moved: I64 = np.zeros(n, np.int64)
        self._errno: I32 = np.zeros(n, np.int32)
        for index in refused:
            self._errno[index] = errno.EIO

    @property
    def done(self) -> bool:
        over = [
            part.done for _, part in self._parts
        ]  # all of them: looking is what moves an engine without threads on
        return all(over)

    def wait(self, timeout_s: float) -> RangeResults:
        deadline = Deadline(timeout_s)
        while not self.done and not deadline.passed:
            time.sleep(min(LOOK_S, deadline.left_s))
        moved, code = self._moved.copy(), self._errno.copy()
        for index, part in self._parts:
            results = part.wait(0.0)
            moved[index], code[index] = results.moved, results.errno
        return RangeResults(moved, code)

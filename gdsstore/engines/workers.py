"""Engines whose calls block: threads that take runs of ranges from the transfers, and are left behind where a call hangs."""

from __future__ import annotations

import errno
import logging
import queue
import threading
from abc import abstractmethod

import numpy as np

from gdsstore.engines.base import I32, I64, Engine, Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.files import FileTable
from gdsstore.errors import DeviceError, EngineError
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.engines")


class WorkerEngine(Engine):
    """Moves ranges with `threads` threads, which start with the first plan. As many calls are under way at the most."""

    def __init__(self, threads: int) -> None:
        self._wanted = threads
        self._files = FileTable()
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[WorkTransfer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.give_up = threading.Event()  # set when nothing new is begun any more

    @abstractmethod
    def _transfer(self, op: Op, plan: RangePlan) -> WorkTransfer:
        """A plan's transfer, not started."""

    def _enter_thread(self) -> None:
        """Runs first in each thread."""

    def attach(self, fd: int, size: int) -> None:
        self._files.add(fd, size)

    def detach(self, fd: int) -> None:
        self._files.discard(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        transfer = self._transfer(op, plan)
        with self._lock:
            if self._closed:
                raise EngineError(f"the {self.name} engine is closed: open the store again")
            self._start_threads()
            for _ in range(min(len(self._threads), transfer.runs)):
                self._work.put(transfer)
        return transfer

    def close(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._work.put(None)  # behind what was submitted
        for thread in self._threads:
            thread.join(deadline.left_s)
        self.give_up.set()
        if self.stuck:
            log.warning(
                "%s engine: %d calls had not ended %.1f s after close; left to the kernel",
                self.name,
                self.stuck,
                timeout_s,
            )

    @property
    def stuck(self) -> int:
        """Threads that still run. After `close`: calls that hang."""
        return sum(thread.is_alive() for thread in self._threads)

    def _start_threads(self) -> None:
        while len(self._threads) < self._wanted:
            # Daemons: a call that hangs in the kernel must not keep the process from exiting.
            thread = threading.Thread(
                target=self._serve, name=f"gdsstore-{self.name}-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise EngineError(f"the {self.name} engine could not start a thread: {error}") from error
                log.warning(
                    "%s engine: only %d of %d threads could start",
                    self.name,
                    len(self._threads),
                    self._wanted,
                )
                self._wanted = len(self._threads)
                return
            self._threads.append(thread)

    def _serve(self) -> None:
        try:
            self._enter_thread()
        except DeviceError as error:  # without the thread its ranges would wait for ever
            log.error("%s engine: %s", self.name, error)
        while (transfer := self._work.get()) is not None:
            transfer.work()


class WorkTransfer(Transfer):
    """The engine's threads take runs from it until none is left."""

    def __init__(self, plan: RangePlan, runs: int, give_up: threading.Event) -> None:
        self.runs = runs
        self._moved: I64 = np.zeros(len(plan), np.int64)
        self._errno: I32 = np.full(len(plan), errno.ETIMEDOUT, np.int32)
        self._change = threading.Condition()
        self._claimed = self._ended = 0  # runs
        self._limit = runs  # runs that are carried out in the end
        self._give_up = give_up

    @abstractmethod
    def _move(self, run: int) -> None:
        """Move the ranges of a run, and `set` their results. Does not raise."""

    def set(self, index: int | slice, moved: int | list[int], code: int | list[int]) -> None:
        with self._change:
            self._moved[index], self._errno[index] = moved, code

    @property
    def done(self) -> bool:
        with self._change:
            return self._ended == self._limit

    def wait(self, timeout_s: float) -> RangeResults:
        with self._change:
            if not self._change.wait_for(lambda: self._ended == self._limit, timeout_s):
                self._limit = self._claimed  # what nobody has begun is not begun any more
            return RangeResults(self._moved.copy(), self._errno.copy())

    def work(self) -> None:
        while (run := self._claim()) is not None:
            try:
                self._move(run)
            finally:
                with self._change:
                    self._ended += 1
                    if self._ended == self._limit:
                        self._change.notify_all()

    def _claim(self) -> int | None:
        with self._change:
            if self._give_up.is_set():
                self._limit = self._claimed
                self._change.notify_all()
            if self._claimed == self._limit:
                return None
            self._claimed += 1
            return self._claimed - 1


class SingleTransfer(WorkTransfer):
    """Each range is a run of its own, for calls that take one range at a time."""

    def __init__(self, op: Op, plan: RangePlan, give_up: threading.Event) -> None:
        super().__init__(plan, len(plan), give_up)
        self.op, self.plan = op, plan

    @abstractmethod
    def _move_one(self, index: int, fd: int, file_offset: int, address: int, length: int) -> tuple[int, int]:
        """Move range `index` of the plan; bytes moved and errno."""

    def _move(self, run: int) -> None:
        plan = self.plan
        try:
            moved, code = self._move_one(
                run,
                int(plan.fd[run]),
                int(plan.file_offset[run]),
                int(plan.address[run]),
                int(plan.length[run]),
            )
        except Exception:  # what it is said to be is of no use to who waits, and the thread is needed
            log.exception("a range failed in a way that nobody foresaw")
            moved, code = 0, errno.EIO
        self.set(run, moved, code)

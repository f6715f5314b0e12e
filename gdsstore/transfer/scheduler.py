"""The mechanism around the transfer policy: worker threads, futures, and waiting for room on the volumes."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, StoreClosedError
from gdsstore.transfer.call_times import CallTimes
from gdsstore.transfer.caps import LearnedCaps
from gdsstore.transfer.policy import NO_KEYS, TransferPolicy
from gdsstore.transfer.policy_stats import Reads, TransferStats, reads_of, snapshot
from gdsstore.transfer.policy_terms import Ask, AskState, Caps, Limits, Request, State, TransferClass, Units
from gdsstore.transfer.scheduler_jobs import Call, Grant, Job
from gdsstore.transfer.scheduler_workers import Workers
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")

T = TypeVar("T")
EXIT_TIMEOUT_S = 30.0
NEVER = float("inf")
LONGEST_WAIT_S = 3600.0

_alive: weakref.WeakSet[Scheduler] = weakref.WeakSet()


class Scheduler:
    """Runs calls in a bounded set of threads, in the order of TransferPolicy, and admits their chunks to the volumes.

    Thread-safe. Threads start with the calls that need them. At interpreter exit what was submitted still runs, for at most
    EXIT_TIMEOUT_S; a call that hangs longer does not keep the process.
    """

    def __init__(self, limits: Limits, caps: Sequence[Caps], learned: LearnedCaps | None = None) -> None:
        """`learned`: see TransferPolicy; it is the scheduler's from here on."""
        self.times = CallTimes()
        self._policy = TransferPolicy(limits, caps, learned)
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)  # no call is left
        self._timer = threading.Condition(self._lock)  # something runs out earlier than the watcher knows
        self._workers = Workers(limits.workers, self._carry_out)
        self._calls: dict[Request, Call[Any]] = {}
        self._sleepers: dict[Ask, threading.Event] = {}
        self._watcher: threading.Thread | None = None
        self._wakes_at = NEVER
        self._closed = False
        self._pid = os.getpid()
        _alive.add(self)

    # --- calls ---

    def submit(
        self,
        work: Callable[[Job[T]], T],
        *,
        cls: TransferClass,
        op: Op,
        nbytes: int,
        deadline: Deadline,
        keys: frozenset[object] = NO_KEYS,
        priority: int = 0,
        otherwise: Callable[[State], T] | None = None,
    ) -> Job[T]:
        """Run `work(job)` in a worker. The future ends in every case: with what the work returned or raised; as another call's for
        the same `keys` (see TransferPolicy.submit); cancelled; or, where the work was never begun, with `otherwise(state)` for
        EXPIRED, DROPPED and REFUSED, and without that a DeadlineError or StoreError.

        The work itself ends by its deadline: memory that it uses cannot be taken from it. `nbytes`: what it moves in all.
        `priority`: of a prefetch. Raises StoreClosedError, and EngineError where no thread can be started; then nothing was done.
        """
        job: Job[T] = Job(self)
        call = Call(job, work, otherwise)
        with self._lock:
            if self._closed:
                raise StoreClosedError("the scheduler is closed: open the store again")
            self._workers.need_one()
            now = time.monotonic()
            request = self._policy.submit(cls, op, nbytes, now + deadline.left_s, now, keys, priority)
            job.request = request
            taken = not request.ended
            if taken:
                self._calls[request] = call
                self._start(now)
            ended = self._take_ended()
            if self._policy.next_event() < self._wakes_at:
                self._wake_watcher()
        if not taken:
            call.settle_unstarted()
        _settle(ended)
        return job

    def cancel(self, job: Job[T]) -> bool:
        """See Job.cancel."""
        with self._lock:
            now = time.monotonic()
            self._policy.cancel(job.request, now)
            self._wake_deciders()
            self._start(now)  # its keys may be free for others
            ended = self._take_ended()
        _settle(ended)
        return job.cancelled()

    # --- chunks ---

    def admit(self, job: Job[Any], units: Units, timeout_s: float) -> Grant | None:
        """Wait until a chunk of a running job may go to the engine, at most `timeout_s`. None where it may not: the time is over,
        or the job shall stop (`job.stopping`).

        `units`: volume index -> bytes and operations. A thread that holds grants asks with a timeout of 0, and gives one of them
        back before it asks again: two that hold some and wait for more could wait for each other.
        """
        with self._lock:
            now = time.monotonic()
            ask = self._policy.ask(job.request, units, now)
            if self._policy.decided:
                self._wake_deciders()
            left_s = min(timeout_s, job.request.deadline - now)
            if ask.state is not AskState.WAITING or left_s <= 0:
                return self._grant(ask)
            event = self._sleepers[ask] = threading.Event()
        event.wait(left_s)
        with self._lock:
            return self._grant(ask)

    def give_back(self, ask: Ask, *, late: bool) -> None:
        """See Grant."""
        with self._lock:
            if late:
                self._policy.late(ask, time.monotonic())
            else:
                self._policy.done(ask, time.monotonic())
            if self._policy.decided:
                self._wake_deciders()

    def set_caps(self, volume: int, caps: Caps) -> None:
        """New caps of a volume, from now on."""
        with self._lock:
            self._policy.set_caps(volume, caps, time.monotonic())
            self._wake_deciders()

    # --- the whole ---

    def stats(self) -> TransferStats:
        with self._lock:
            return snapshot(self._policy, time.monotonic())

    def reads(self) -> Reads:
        with self._lock:
            return reads_of(self._policy)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every call has ended, at most `timeout_s`. Whether it is so."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._calls, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Cancel what was not begun, and wait for the rest, at most `timeout_s`. Futures of calls that run longer end with a
        DeadlineError, and those calls are told to stop. Idempotent."""
        deadline = Deadline(timeout_s)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._policy.cancel_waiting()
            ended = self._take_ended()
            self._timer.notify_all()
        _settle(ended)
        self.drain(deadline.left_s)
        with self._lock:
            left = list(self._calls.values())
            for call in left:
                self._policy.cancel(call.job.request, time.monotonic())
            self._wake_deciders()
            self._workers.dismiss()
        if left:
            log.error(
                "%d transfers had not ended %g s after close; their threads are left behind",
                len(left),
                timeout_s,
            )
        for call in left:
            call.job.settle(
                DeadlineError("a transfer had not ended when the store was closed", timeout_s=timeout_s)
            )
        self._workers.join(0.0 if left else deadline.left_s)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(deadline.left_s)

    # --- inside, with the lock held ---

    def _start(self, now: float) -> None:
        while (request := self._policy.start(now)) is not None:
            call = self._calls[request]
            call.job.set_running_or_notify_cancel()
            self._workers.put(call)

    def _wake_watcher(self) -> None:
        self._wakes_at = self._policy.next_event()
        if self._watcher is None:
            watcher = threading.Thread(target=self._watch, name="gdsstore-deadlines", daemon=True)
            try:
                watcher.start()
            except RuntimeError as error:
                log.warning("no thread for deadlines could be started; workers look at them: %s", error)
                return
            self._watcher = watcher
        self._timer.notify()

    def _wake_deciders(self) -> None:
        for ask in self._policy.decided:
            event = self._sleepers.pop(ask, None)
            if event is not None:
                event.set()
        self._policy.decided.clear()

    def _grant(self, ask: Ask) -> Grant | None:
        """What an ask has come to; it waits no longer."""
        if ask.state is AskState.GRANTED:
            return Grant(self, ask)
        self._sleepers.pop(ask, None)
        self._policy.done(ask, time.monotonic())
        self._wake_deciders()
        return None

    def _take_ended(self) -> list[Call[Any]]:
        """The calls that ended without having run themselves, to be settled when the lock is free."""
        if not self._policy.ended:
            return []
        calls = [self._calls.pop(request) for request in self._policy.ended]
        self._policy.ended.clear()
        if not self._calls:
            self._quiet.notify_all()
        return calls

    # --- in the threads ---

    def _carry_out(self, call: Call[Any]) -> None:
        result = self.times.carry_out(call)
        request = call.job.request
        with self._lock:
            # Before the future ends: who then asks for the same keys again must not join this one.
            self._policy.finish(request, time.monotonic())
            self._wake_deciders()
            del self._calls[request]
            ended = self._take_ended()
            if not self._calls:
                self._quiet.notify_all()
        call.job.settle(result)
        for other in ended:
            if other.job.request.leader is request and other.job.request.state is State.DONE:
                other.job.settle(result)
            else:
                other.settle_unstarted()
        with self._lock:
            self._workers.free()
            self._start(time.monotonic())
            ended = self._take_ended()
        _settle(ended)

    def _watch(self) -> None:
        """End what waits too long, also while no worker is free to notice."""
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                self._policy.expire(now)
                self._start(now)
                ended = self._take_ended()
                if not ended:
                    self._wakes_at = self._policy.next_event()
                    self._timer.wait(min(self._wakes_at - now, LONGEST_WAIT_S))
            _settle(ended)


def _settle(calls: Iterable[Call[Any]]) -> None:
    for call in calls:
        call.settle_unstarted()


@atexit.register
def _finish_at_exit() -> None:
    for scheduler in list(_alive):
        if scheduler._pid == os.getpid():  # a forked child has none of the threads that would end anything
            scheduler.drain(EXIT_TIMEOUT_S)
            scheduler.close(0.0)

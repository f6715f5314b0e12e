"""Eight threads that do everything at once to a small store whose drive does everything wrong, and what is left after that.

A program of its own: `python -X dev -m tests.transfer.hammer DIRECTORY SECONDS SEED` prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gdsstore import DeadlineError, PageLayout, PageStatus
from gdsstore.engines.faults import Fault, FaultKind, parse_faults
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.tiers.policy import WritePolicy
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.pipeline import LayersComputed
from gdsstore.transfer.results import CallResult
from tests.store.helpers import U8, WAIT_S, make_keys, opaque, small_store, truth

THREADS = 8
LAYOUT = PageLayout.mla(layers=4, latent_dim=64, page_tokens=16, dtype="bfloat16")  # two layers a block
PAGE_BYTES = LAYOUT.page_bytes
PROMPTS = 48
PAGES = 40  # of a prompt: 15 MiB in all, about twice what the store holds
GROUPS = [LayerGroup(0, 1), LayerGroup(1, 4)]
AT_ONCE = 3  # calls of one thread
ACTIONS = [
    ("save", 30),
    ("load", 30),
    ("load layers", 12),
    ("save layers", 10),
    ("prefetch", 14),
    ("cancel", 8),
    ("delete", 8),
    ("raise the dead", 2),
    ("clear", 0.05),
]
ROUND_S = 5.0  # after which the store is opened with the next write policy
CLOSE_S = 20.0
PATIENCE_S = 100.0
FAULTS = (
    Fault(FaultKind.HANG, probability=0.05, limit=2),  # so that there are some in each round
    *parse_faults("errno:0.03,short:0.03,corrupt:0.02,misdirect:0.02,delay:0.03:0.01,hang:0.004"),
)
RELEASE_S = 0.5  # how often what hangs is let go
SETTINGS: dict[str, Any] = {
    "capacity": "16MiB",
    "chunk_bytes": "64KiB",
    "workers": 4,
    "host_cache": "3MiB",
    "staging_bytes": "1MiB",
    "io_deadline_s": 3,
    "maintain_interval_s": 0.05,
    "durability": "none",
    "drive_breaker": "off",  # or its pages would miss most of the time
}


@dataclass
class Found:
    """What the whole run has shown; all but `calls` and `outcomes` should stay empty or zero."""

    calls: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reclaimed: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_much(self) -> bool:
        """Whether everything has happened that may go wrong."""
        kinds = {fault.kind.value for fault in FAULTS if self.injected[fault.kind.value]}
        return (
            self.reclaimed > 0
            and kinds == {fault.kind.value for fault in FAULTS}
            and self.outcomes["LOADED"] > 100
        )


@dataclass
class Call:
    """A call under way; `memory` must not be touched before it is over."""

    future: Future[Any]
    keys: U8
    memory: U8 | None = None
    loads: bool = False


def memory_for(keys: U8, rng: random.Random) -> U8:
    """Half of it such that the drive reaches it in place."""
    raw = np.empty(len(keys) * PAGE_BYTES + 4096, np.uint8)
    start = -raw.ctypes.data % 4096 + (0 if rng.random() < 0.5 else 8)
    return raw[start : start + len(keys) * PAGE_BYTES].reshape(len(keys), PAGE_BYTES)


class Hammer:
    """One round: a store, the threads that use it, and what they saw."""

    def __init__(self, path: Path, policy: WritePolicy, seed: int, found: Found) -> None:
        self._path, self._policy, self._seed, self._found = path, policy, seed, found
        self._engine = FaultyEngine(PosixEngine(2), FAULTS, seed)
        self._store = small_store(path, own_engine=self._engine, write_policy=policy, **SETTINGS)
        self._pages = self._store.namespace(model="test", layout=LAYOUT)
        self._lock = threading.Lock()
        self._over, self._closed = threading.Event(), threading.Event()
        self._futures: list[Future[Any]] = []
        self._kept: list[tuple[CallResult, U8]] = []  # memory that the drive may still use

    def run(self, seconds: float) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(random.Random(self._seed + i),), name=f"hammer-{i}")
            for i in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        releaser = threading.Thread(target=self._release, name="hammer-release")
        releaser.start()
        time.sleep(seconds)
        self._over.set()
        for thread in threads:
            thread.join()
        self._finish()
        self._closed.set()
        releaser.join()
        self._look_around()

    # --- in the threads ---

    def _release(self) -> None:
        """Let go of what hangs, also of what hangs while the store is closed."""
        while not self._closed.wait(RELEASE_S):
            self._engine.release_hangs()

    def _guarded(self, rng: random.Random) -> None:
        try:
            self._hit(rng)
        except Exception as error:  # the report is to say so
            self._error(f"a thread ended: {error!r}")

    def _hit(self, rng: random.Random) -> None:
        calls: list[Call] = []
        while not self._over.is_set():
            action = rng.choices(*zip(*ACTIONS, strict=True))[0]
            with self._lock:
                self._found.calls[action] += 1
            first, last = sorted((rng.randrange(PAGES), rng.randrange(1, PAGES + 1)))
            keys = PROMPT_KEYS[rng.randrange(PROMPTS)][first : max(last, first + 1)]
            if action == "delete":
                self._try(lambda: self._pages.delete(keys))  # noqa: B023
            elif action == "clear":
                self._try(self._pages.clear)
            elif action == "raise the dead":
                self._raise_the_dead(make_keys(20, rng.random()), rng)
            elif action == "cancel":
                if calls:
                    rng.choice(calls).future.cancel()
            else:
                calls.append(self._begin(action, keys, rng))
            if len(calls) > AT_ONCE:
                self._end(calls.pop(rng.randrange(len(calls))))
        for call in calls:
            self._end(call)

    def _begin(self, action: str, keys: U8, rng: random.Random) -> Call:
        deadline_s = rng.choice((0.05, 0.3, 1.0, 2.5))
        if action == "prefetch":
            call = Call(self._pages.prefetch(keys, deadline_s=deadline_s).future, keys)
        else:
            memory = memory_for(keys, rng)
            if action == "save":
                memory[:] = truth(keys, PAGE_BYTES)
                call = Call(self._pages.save(keys, memory, deadline_s=deadline_s), keys, memory)
            elif action == "save layers":
                memory[:] = truth(keys, PAGE_BYTES)
                computed = LayersComputed()
                future = self._pages.save_layers(keys, memory, computed, groups=GROUPS, deadline_s=deadline_s)
                call = Call(future, keys, memory)
                for layer in range(rng.choice((LAYOUT.layers, LAYOUT.layers, rng.randrange(LAYOUT.layers)))):
                    computed.computed(layer + 1)  # some forwards never end
            elif action == "load layers":
                memory[:] = 0xEE
                told: list[int] = []
                future = self._pages.load_layers(
                    keys,
                    memory,
                    lambda first, last, ok: told.append(last),
                    groups=GROUPS,
                    deadline_s=deadline_s,
                )
                call = Call(future, keys, memory, loads=True)
                future.add_done_callback(lambda done: self._all_told(done, told))
            else:
                memory[:] = 0xEE
                call = Call(self._pages.load(keys, memory, deadline_s=deadline_s), keys, memory, loads=True)
        with self._lock:
            self._futures.append(call.future)
        return call

    def _all_told(self, done: Future[Any], told: list[int]) -> None:
        if not done.cancelled() and told != [group.last for group in GROUPS] and told != [LAYOUT.layers]:
            self._error(f"a forward was told of layers up to {told}")

    def _end(self, call: Call) -> None:
        try:
            result: CallResult = call.future.result(WAIT_S)
        except CancelledError:
            return
        wrong = 0
        if call.loads and call.memory is not None:
            wrong = int((result.ok & (call.memory != truth(call.keys, PAGE_BYTES)).any(axis=1)).sum())
        with self._lock:
            self._found.wrong += wrong
            self._found.outcomes.update(result.reasons())
            if result.memory_in_use and call.memory is not None:
                self._kept.append((result, call.memory))

    def _raise_the_dead(self, keys: U8, rng: random.Random) -> None:
        """Delete pages that nobody else knows while they are being loaded and prefetched: none may be found after that."""
        self._end(self._begin("save", keys, rng))
        calls = [self._begin(action, keys, rng) for action in ("load", "prefetch", "load")]
        time.sleep(rng.random() * 0.02)
        gone = False
        with contextlib.suppress(DeadlineError):
            self._pages.delete(keys)
            gone = True
        for call in calls:
            self._end(call)
        last = self._pages.load(keys, memory_for(keys, rng))
        risen = last.result(WAIT_S).count(PageStatus.LOADED) + int(self._pages.contains(keys).sum())
        if gone and risen:
            self._error(f"{self._policy}: {risen} deleted pages came back")
        with self._lock:
            self._futures.append(last)

    def _try(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(DeadlineError):  # a page that is being written to a drive that hangs
            call()

    def _error(self, text: str) -> None:
        with self._lock:
            self._found.errors.append(text)

    # --- afterwards ---

    def _finish(self) -> None:
        store, found = self._store, self._found
        self._until(lambda: all(future.done() for future in self._futures), "futures are not done")
        self._until(
            lambda: not any(result.memory_in_use for result, _ in self._kept), "memory is still in use"
        )
        self._until(lambda: store._scheduler._policy.idle, "the scheduler is not idle")
        self._until(lambda: self._staging() == (0, 0), "staging is leased or in quarantine")
        self._until(lambda: store.cache.stats()["pins"] == 0, "records of the host cache are pinned")
        found.reclaimed += store.reclaimer.counts.segments
        found.injected.update(self._engine.injected)
        start = time.monotonic()
        store.close(CLOSE_S)
        if time.monotonic() - start > CLOSE_S:
            self._left("closing took too long")

    def _look_around(self) -> None:
        names: list[str] = []
        for _ in range(int(CLOSE_S / 0.01)):  # one that has been told to end may need a processor for that
            names = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
            if not names:
                break
            time.sleep(0.01)
        if names:
            self._left(f"threads: {names}")
        files = [target for target in map(_target, os.listdir("/proc/self/fd")) if ".seg" in target]
        if files:
            self._left(f"open files: {files}")
        self._check_what_is_stored()

    def _check_what_is_stored(self) -> None:
        """With a drive that is well: what the faults have left in the files must not be served either."""
        with small_store(self._path, capacity="16MiB") as store:
            pages = opaque(store, PAGE_BYTES)
            for keys in PROMPT_KEYS:
                memory = np.full((PAGES, PAGE_BYTES), 0xEE, np.uint8)
                result = pages.load(keys, memory).result(WAIT_S)
                self._found.wrong += int((result.ok & (memory != truth(keys, PAGE_BYTES)).any(axis=1)).sum())

    def _staging(self) -> tuple[int, int]:
        arena = self._store.moving().staging.arena()
        with contextlib.suppress(DeadlineError):
            arena.lease(arena.size_bytes, 0.0).release()  # who needs bytes looks what is still in quarantine
        stats = arena.stats()
        return stats.leased_bytes, stats.quarantined_bytes

    def _until(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + CLOSE_S
        while not true():
            if time.monotonic() > end:
                self._left(what)
                return
            time.sleep(0.01)
            self._store.sweep()

    def _left(self, what: str) -> None:
        self._found.left.append(f"{self._policy}: {what}")


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


PROMPT_KEYS = [make_keys(PAGES, f"prompt {i}") for i in range(PROMPTS)]


def hammer(path: Path, seconds: float, seed: int) -> Found:
    """For so many seconds, and on a slow machine for longer: until there was something to find."""
    found = Found()
    rounds = max(len(WritePolicy), round(seconds / ROUND_S))
    end = time.monotonic() + seconds + PATIENCE_S
    for number, policy in zip(itertools.count(), itertools.cycle(WritePolicy)):
        if number >= rounds and (found.is_much or time.monotonic() > end):
            break
        Hammer(path, policy, seed + 1000 * number, found).run(seconds / rounds)
    return found


if __name__ == "__main__":
    print(json.dumps(vars(hammer(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))))

"""One life of a process that uses a store until it is killed. Run by the zygote; also: `python -m tests.crash.worker SPEC`."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import gdsstore
from gdsstore import Config, PageStatus, SaveResult, Store
from gdsstore.replay.truth import count_wrong
from tests.crash.checking import BrokenPromiseError, Terms, check
from tests.crash.image import write_image
from tests.crash.journal import Journal, Promise, read_ledger
from tests.crash.pages import LANE_BITS, PAGE_BYTES, keys_of, namespaces, pages_of, room_for
from tests.crash.recorder import Recorder
from tests.crash.steps import Steps

SHARED_LANE = 0
SHARED_PAGES = 600
ACCEPTED_MISSES = (PageStatus.MISS_ABSENT, PageStatus.MISS_RECLAIMED)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a life does. `new_pages`: how many fresh pages it saves at the most, so that a store without reclaim holds them."""

    store: str
    journal: str
    seed: int
    lane: int = 1
    more_volumes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    lossless: bool = True
    check_first: bool = True
    alone: bool = True
    opens: int = 1_000_000
    calls_per_open: int = 60
    new_pages: int = 1_000_000
    share: float = 0.0  # of saves that go to the lane of all
    seconds: float = 20.0
    die_at: int = 0  # the step, see steps.py, at which it kills itself; 0: never
    image: str = ""  # where it leaves what a power cut at that step would leave
    torn: bool = False  # the store comes from a power cut

    def encode(self) -> str:
        return json.dumps(asdict(self))


def live(spec: Spec) -> int:
    """Use the store; ends with 0 when `opens` are done or the file `stop` appears beside the journal."""
    journal = Journal(Path(spec.journal))
    if spec.die_at:
        die_at_a_step(spec, journal)
    try:
        Life(spec, journal).run()
    except (BrokenPromiseError, gdsstore.GdsStoreError) as error:
        journal.fail(f"{type(error).__name__}: {error}")
        return 1
    return 0


def die_at_a_step(spec: Spec, journal: Journal) -> None:
    if not spec.image:
        Steps(spec.die_at, lambda where: journal.phase(f"dies {where}")).install()
        return
    recorder = Recorder(Path(spec.store))
    recorder.install()

    def cut(where: str) -> None:
        journal.phase(f"dies {where}")
        journal.end("cut")
        write_image(recorder, Path(spec.image), random.Random(spec.seed))

    Steps(spec.die_at, cut).install()


class Life:
    def __init__(self, spec: Spec, journal: Journal) -> None:
        self._spec, self._journal = spec, journal
        self._rng = np.random.default_rng(spec.seed)
        self._stop = Path(spec.journal).with_name("stop")
        self._end = time.monotonic() + spec.seconds
        self._left = spec.new_pages
        self._ledger = read_ledger(Path(spec.journal))

    def run(self) -> None:
        spec = self._spec
        for turn in range(spec.opens):
            if self._over():
                break
            self._journal.phase("opening")
            with gdsstore.open([spec.store, *spec.more_volumes], config=Config(**spec.settings)) as store:
                self._journal.phase("opened")
                if spec.check_first and turn == 0:
                    count = check(store, self._ledger, Terms(spec.lossless, spec.alone, spec.torn))
                    self._journal.phase(f"checked {count}")
                self._journal.phase("busy")
                self._use(store)
                self._journal.phase(f"reclaimed {store.stats()['segments_reclaimed']}")
                self._journal.phase("closing")
            self._journal.phase("closed")

    def _over(self) -> bool:
        return self._stop.exists() or time.monotonic() > self._end

    def _use(self, store: Store) -> None:
        calls = int(self._rng.integers(0, self._spec.calls_per_open + 1))
        saves: deque[Callable[[], None]] = deque()
        for _ in range(calls):
            if self._over():
                break
            match self._rng.choice(5, p=(0.6, 0.2, 0.08, 0.08, 0.04)):
                case 0:
                    fresh = self._fresh()
                    saves.append(self._save(store, *fresh))
                    if self._rng.random() < 0.15:  # two users of one store meet the same prompt
                        saves.append(self._save(store, *fresh))
                case 1:
                    self._load(store)
                case 2:
                    saves.append(self._save(store, *self._old()))
                case 3:
                    while saves:
                        saves.popleft()()
                    self._delete(store)
                case _:
                    self._sync(store)
            while len(saves) > self._rng.integers(0, 3):  # none, one or two saves go on under the next call
                saves.popleft()()
        while saves:
            saves.popleft()()

    # --- calls ---

    def _fresh(self) -> tuple[int, npt.NDArray[np.int64]]:
        count = int(self._rng.integers(1, 49))
        if self._rng.random() < self._spec.share:
            low = int(self._rng.integers(0, SHARED_PAGES))
            return SHARED_LANE, low + 2 * np.arange(min(count, (SHARED_PAGES - low + 1) // 2))
        count = min(count, self._left)
        self._left -= count
        used = len(np.trim_zeros(self._ledger.lane(self._spec.lane), "b"))
        low = used + int(self._rng.integers(0, 2))
        return self._spec.lane, low + 2 * np.arange(count)

    def _old(self) -> tuple[int, npt.NDArray[np.int64]]:
        lane = self._spec.lane
        used = len(np.trim_zeros(self._ledger.lane(lane), "b"))
        low = int(self._rng.integers(0, max(1, used)))
        positions = np.arange(low, min(used, low + 2 * int(self._rng.integers(1, 33))), 2)
        touched = self._ledger.lane(lane)[positions] != Promise.NOTHING
        return lane, positions[: int(np.append(touched, False).argmin())]

    def _note(self, word: str, lane: int, positions: npt.NDArray[np.int64]) -> None:
        self._journal.pages(word, lane, positions)
        if len(positions):
            self._ledger.note(word, lane, int(positions[0]), int(positions[-1]))

    def _save(self, store: Store, lane: int, positions: npt.NDArray[np.int64]) -> Callable[[], None]:
        """Start a save; the returned call waits for it and writes down what was promised."""
        if not len(positions):
            return lambda: None
        parity = int(positions[0]) % 2
        keys = keys_of(lane << LANE_BITS | positions)
        pages = pages_of(keys, PAGE_BYTES[parity])
        self._note("saving", lane, positions)
        future = namespaces(store)[parity].save(keys, pages)
        return lambda: self._saved(future, pages, lane, positions)

    def _saved(
        self, future: Future[SaveResult], _alive: object, lane: int, positions: npt.NDArray[np.int64]
    ) -> None:
        result = future.result()
        if self._spec.lossless and not result.all_ok:
            raise BrokenPromiseError(f"a save failed: {result.reasons()}")
        bad = {name for name in result.reasons() if name not in ("SAVED", "ALREADY_THERE", "FAILED_NO_SPACE")}
        if bad:
            raise BrokenPromiseError(f"a save ended with {bad}")
        good = int(result.ok.argmin()) if not result.all_ok else len(positions)
        kept = self._spec.settings.get("durability") == "commit"
        self._note("kept" if kept else "saved", lane, positions[:good])
        if good:
            self._journal.phase("saved")

    def _sync(self, store: Store) -> None:
        self._journal.mark("syncing")
        store.sync()
        self._journal.mark("synced")

    def _load(self, store: Store) -> None:
        lane = SHARED_LANE if self._rng.random() < self._spec.share else self._spec.lane
        promises = self._ledger.lane(lane)
        used = len(np.trim_zeros(promises, "b"))
        if used == 0:
            return
        low = int(self._rng.integers(0, used))
        positions = np.arange(low, min(used, low + 64), 2)
        keys = keys_of(lane << LANE_BITS | positions)
        pages = room_for(len(keys), PAGE_BYTES[low % 2])
        result = namespaces(store)[low % 2].load(keys, pages).result()
        wrong = np.intersect1d(count_wrong(keys, pages), np.flatnonzero(result.ok))
        if len(wrong):
            raise BrokenPromiseError(f"WRONG BYTES: lane {lane}, {positions[wrong].tolist()}")
        if self._spec.lossless:
            lost = (promises[positions] == Promise.THERE) & ~result.ok
            if lost.any():
                raise BrokenPromiseError(
                    f"not loaded: lane {lane}, {positions[lost].tolist()}, {result.reasons()}"
                )
        if not np.isin(result.status[~result.ok], ACCEPTED_MISSES).all():
            raise BrokenPromiseError(f"a load ended with {result.reasons()}")

    def _delete(self, store: Store) -> None:
        lane, positions = self._old()
        if len(positions):
            self._note("deleting", lane, positions)
            namespaces(store)[int(positions[0]) % 2].delete(keys_of(lane << LANE_BITS | positions))
            self._note("deleted", lane, positions)


if __name__ == "__main__":
    sys.exit(live(Spec(**json.loads(sys.argv[1]))))

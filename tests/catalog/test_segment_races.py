"""Several threads that get segments ready at the same time: every slot is given out once, and no segment is forgotten."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from gdsstore.catalog.allocate import SegmentPool
from gdsstore.catalog.owned import OwnedSegment, SlotRun
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.catalog.take import SegmentTaker
from gdsstore.errors import VolumeError
from gdsstore.volume.format import Geometry
from gdsstore.volume.placement import Placement
from gdsstore.volume.volume import Volume
from gdsstore.waiting import Deadline

SLOT = 128 << 10  # so that a segment of 1 MiB holds a few
SEGMENT_BYTES = 1 << 20
WAIT_S = 60.0
Filling = Callable[[], Sequence[OwnedSegment]]


class FakeVolume:
    def __init__(self, index: int) -> None:
        self.index = index


class FakePlacement:
    """In turn, over `volumes` volumes."""

    def __init__(self, volumes: int) -> None:
        self._volumes, self._next = volumes, 0

    def choose(self) -> int:
        self._next += 1
        return self._next % self._volumes


class FakeTaker:
    """Makes segments out of files in a directory. `plan`: what a take does instead; see the tests."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self.made: list[OwnedSegment] = []
        self.lock_fds: set[int] = set()
        self.plan: Callable[[int, int, Filling], OwnedSegment | None] = lambda slot_bytes, volume, filling: (
            self.make(slot_bytes, volume)
        )

    def take(self, slot_bytes: int, volume: int, filling: Filling) -> OwnedSegment | None:
        return self.plan(slot_bytes, volume, filling)

    def make(self, slot_bytes: int, volume: int) -> OwnedSegment:
        geometry = Geometry.of(SEGMENT_BYTES, slot_bytes)
        with self._lock:
            number = len(self.made)
            path = self._directory / f"{number}.seg"
            fd = os.open(path, os.O_RDWR | os.O_CREAT)
            row = SegmentRow(number, volume, SegmentState.OPEN, slot_bytes, geometry.slot_count, 1, 0)
            owned = OwnedSegment(row, geometry, cast(Volume, FakeVolume(volume)), fd)
            self.made.append(owned)
        return owned


def pool_of(taker: FakeTaker, volumes: int) -> SegmentPool:
    return SegmentPool(cast(SegmentTaker, taker), cast(Placement, FakePlacement(volumes)))


@pytest.fixture
def taker(tmp_path: Path) -> FakeTaker:
    return FakeTaker(tmp_path)


@pytest.fixture
def pool(taker: FakeTaker) -> Iterator[SegmentPool]:
    pool = pool_of(taker, 2)
    yield pool
    pool.close()


def open_files(segments: Sequence[OwnedSegment]) -> Counter[str]:
    """How many descriptors are open of each segment's file."""
    names = {f"{segment.segment_id}.seg" for segment in segments}
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        except OSError:
            continue
        found.update([name] if name in names else [])
    return found


def assert_none_is_forgotten(pool: SegmentPool, taker: FakeTaker) -> None:
    """What is owned and has nothing under way is being filled, and the lock of all else is given up."""
    for segment in pool._owned.values():
        assert not segment.released
        assert segment.outstanding == 0
        assert segment.room > 0
        assert segment in pool._open.values(), "it stays half full for as long as we live"
    assert set(pool._open.values()) == set(pool._owned.values())
    assert sorted(open_files(taker.made)) == sorted(f"{id_}.seg" for id_ in pool._owned)


def test_takes_for_two_volumes_that_end_in_the_same_one_leave_no_segment_behind(
    pool: SegmentPool, taker: FakeTaker
) -> None:
    both = threading.Barrier(2)

    def plan(slot_bytes: int, volume: int, filling: Filling) -> OwnedSegment:
        assert filling() == []  # neither sees the other's
        both.wait(WAIT_S)
        return taker.make(slot_bytes, 1)

    taker.plan = plan
    runs: list[list[SlotRun]] = []
    threads = [
        threading.Thread(target=lambda: runs.append(pool.reserve(SLOT, 1, Deadline(WAIT_S))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [sum(run.count for run in each) for each in runs] == [1, 1]
    for each in runs:
        for run in each:
            pool.finish(run, failed=False)
    assert_none_is_forgotten(pool, taker)


def test_a_segment_that_is_filled_up_while_it_is_handed_to_another_volume_does_not_come_back(
    pool: SegmentPool, taker: FakeTaker
) -> None:
    def fill(segment: OwnedSegment) -> None:
        run = SlotRun(segment, segment.next_slot, segment.room)
        segment.next_slot += run.count
        segment.outstanding += 1
        pool.finish(run, failed=False)

    first = pool.reserve(SLOT, 1, Deadline(WAIT_S))  # of volume 1
    pool.finish(first[0], failed=False)

    def plan(slot_bytes: int, volume: int, filling: Filling) -> OwnedSegment:
        taker.plan = lambda slot_bytes, volume, filling: taker.make(slot_bytes, volume)
        (usable,) = filling()
        fill(usable)
        return usable

    taker.plan = plan
    runs = pool.reserve(SLOT, 1, Deadline(WAIT_S))  # of volume 0, which has no room
    assert sum(run.count for run in runs) == 1
    assert first[0].owned.segment_id not in pool._owned
    for fd in pool.lock_fds:
        os.fstat(fd)
    for run in runs:
        pool.finish(run, failed=False)
    assert_none_is_forgotten(pool, taker)


def test_slots_are_given_back_where_no_further_segment_can_be_had(
    pool: SegmentPool, taker: FakeTaker
) -> None:
    made = taker.plan

    def plan(slot_bytes: int, volume: int, filling: Filling) -> OwnedSegment | None:
        if taker.made:
            raise VolumeError("the drive is gone")
        return made(slot_bytes, volume, filling)

    taker.plan = plan
    with pytest.raises(VolumeError, match="gone"):
        pool.reserve(SLOT, 100, Deadline(WAIT_S))
    assert [segment.outstanding for segment in taker.made] == [0]
    assert open_files(taker.made) == Counter(), "it is full, and nobody writes to it any more"


@pytest.mark.parametrize("seed", range(3))
def test_every_slot_is_given_out_once_and_every_segment_let_go_of(taker: FakeTaker, seed: int) -> None:
    pool = pool_of(taker, 3)
    random_plan = random.Random(seed)

    def plan(slot_bytes: int, volume: int, filling: Filling) -> OwnedSegment | None:
        time.sleep(random_plan.random() * 0.002)
        mine = filling()
        what = random_plan.random()
        time.sleep(random_plan.random() * 0.001)
        if mine and what < 0.3:
            return mine[0]
        if what < 0.4:
            return None
        if what < 0.5:
            raise VolumeError("not now")
        return taker.make(slot_bytes, volume if what < 0.8 else 2)

    taker.plan = plan
    given: list[tuple[int, int]] = []
    errors: list[str] = []
    lock = threading.Lock()

    def use(rng: random.Random) -> None:
        held: list[tuple[SlotRun, bool]] = []
        for _ in range(60):
            try:
                runs = pool.reserve(
                    rng.choice((SLOT, SLOT // 2)), rng.randrange(1, 6), Deadline(rng.random() * 0.01)
                )
            except VolumeError:
                runs = []
            except Exception as error:  # the test is to say so
                errors.append(repr(error))
                return
            with lock:
                given.extend((run.owned.segment_id, run.first + i) for run in runs for i in range(run.count))
                errors.extend("of a released segment" for run in runs if run.owned.released)
            for run in runs:
                if rng.random() < 0.2:
                    pool.hold(run)
                    held.append((run, False))
                held.append((run, rng.random() < 0.05))
            rng.shuffle(held)
            while len(held) > 3:
                run, failed = held.pop()
                pool.finish(run, failed=failed)
        for run, failed in held:
            pool.finish(run, failed=failed)

    threads = [threading.Thread(target=use, args=(random.Random(100 * seed + i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    end = time.monotonic() + WAIT_S
    while pool._takes and time.monotonic() < end:
        time.sleep(0.001)
    assert errors == []
    assert given
    assert max(Counter(given).values()) == 1
    assert_none_is_forgotten(pool, taker)
    pool.close(WAIT_S)
    assert open_files(taker.made) == Counter()

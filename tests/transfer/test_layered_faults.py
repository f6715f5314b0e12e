"""Layer-wise loads when something goes wrong: no page counts that a plain load would refuse, and nobody is left waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore import PageStatus, Store
from gdsstore.engines.base import Op, RangePlan, Transfer
from gdsstore.engines.faulty import FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.layout import ALIGNMENT
from gdsstore.transfer.layered_cuts import block_ranges
from tests.store.helpers import (
    WAIT_S,
    flip,
    locate,
    make_keys,
    memory_directory,
    save,
    segments,
    small_store,
    statuses,
)
from tests.transfer.faults import PATIENCE_S, fault, faulty, reaching
from tests.transfer.layered_rig import (
    COUNT,
    EVERYONE,
    FILL,
    GROUPS,
    KEYS,
    LAYOUT,
    LAYOUTS,
    Mask,
    PieceMemory,
    assert_loaded_is_true,
    bind,
    cuts_of,
    groups_of,
    load_layers,
)

DEADLINE_S = 0.6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def stored(path: Path) -> Path:
    with small_store(path) as store:
        assert save(bind(store), KEYS, LAYOUT.page_bytes).all_ok
    return path


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_flipped_bit_in_any_block_is_found_at_the_end(path: Path, zero_copy: bool) -> None:
    blocks = LAYOUT.record_bytes // ALIGNMENT
    with small_store(path, zero_copy=zero_copy) as store:
        namespace = bind(store)
        keys = make_keys(blocks + 1)
        assert save(namespace, keys, LAYOUT.page_bytes).all_ok
        segment, offset = locate(namespace, keys)
        for block in range(blocks):  # page i is damaged in block i: also in the padding of the last
            file = segments(path)[segment[block]]
            assert int(file.stem) == segment[block]
            flip(file, 8 * int(offset[block] + block * ALIGNMENT) + 8 * ALIGNMENT - 1)
        result, forward, memory = load_layers(store, keys)
        assert statuses(result) == ["MISS_CHECKSUM"] * blocks + ["LOADED"]
        assert_loaded_is_true(result, keys, LAYOUT, memory)
        assert forward.wrong <= set(range(blocks))
        assert namespace.contains(keys).tolist() == result.ok.tolist()


MIXES = [
    *([kind] for kind in FaultKind if kind is not FaultKind.HANG),
    [kind for kind in FaultKind if kind is not FaultKind.HANG],
]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.sampled_from(MIXES),
    probability=st.sampled_from([0.02, 0.3]),
    zero_copy=st.booleans(),
    name=st.sampled_from(sorted(LAYOUTS)),
    data=st.data(),
)
def test_no_mix_of_faults_gives_wrong_bytes(
    seed: int, kinds: list[FaultKind], probability: float, zero_copy: bool, name: str, data: st.DataObject
) -> None:
    layout, keys = LAYOUTS[name], make_keys(40, seed)
    groups = groups_of(data.draw(cuts_of(layout.layers)))
    faults = [
        fault(
            kind,
            probability / len(kinds),
            op=Op.READ,
            **({"delay_s": 0.002} if kind is FaultKind.DELAY else {}),
        )
        for kind in kinds
    ]
    own = faulty(*faults, seed=seed)
    with (
        memory_directory() as directory,
        small_store(directory / "s", own_engine=own, zero_copy=zero_copy, chunk_bytes="64KiB") as store,
    ):
        assert save(bind(store, layout), keys, layout.page_bytes).all_ok
        result, forward, memory = load_layers(store, keys, layout, groups)
        assert_loaded_is_true(result, keys, layout, memory)
        assert set(result.reasons()) <= {"LOADED", "MISS_CHECKSUM", "MISS_IO"}
        assert not result.memory_in_use
        assert [(first, last) for first, last, _ in forward.told] == groups
        assert set(np.flatnonzero(result.ok)) <= set(forward.told[-1][2])
        assert not forward.wrong & set(np.flatnonzero(result.ok).tolist())


def test_a_page_that_fails_is_not_good_in_later_layers_and_nothing_more_of_it_is_read(stored: Path) -> None:
    with small_store(stored) as store:
        offset = locate(bind(store), KEYS)[1][3]
        ((second, *_),) = block_ranges(LAYOUT, GROUPS)[1:2]
    read: list[int] = []

    def bad(plan: object) -> Mask:
        offsets = np.asarray(plan.file_offset)  # type: ignore[attr-defined]
        read.extend(offsets.tolist())
        return np.asarray(offsets == offset + second.offset)

    own = faulty(fault(FaultKind.ERRNO, op=Op.READ, match=bad))
    with small_store(
        stored, own_engine=own, staging_bytes="64KiB", chunk_bytes="64KiB", zero_copy=False
    ) as store:
        result, forward, _ = load_layers(store)
        others = [page for page in EVERYONE if page != 3]
        assert statuses(result)[3] == "MISS_IO"
        assert np.flatnonzero(result.ok).tolist() == others
        assert [pages for _, _, pages in forward.told] == [EVERYONE, others, others]
        assert offset + block_ranges(LAYOUT, GROUPS)[2][0].offset not in read
        assert store.stats()["io_retries"] > 0


@pytest.fixture
def hanging(stored: Path) -> Iterator[tuple[Store, FaultyEngine]]:
    """A store in which what is read of the second group hangs."""
    later = block_ranges(LAYOUT, GROUPS)[1][0].length
    engine = faulty(fault(FaultKind.HANG, op=Op.READ, match=lambda plan: plan.length == later))
    with small_store(stored, own_engine=engine, zero_copy=False) as store:
        store.moving().staging.arena()
        yield store, engine
        engine.release_hangs()


def test_a_group_that_hangs_ends_at_the_deadline_and_its_memory_is_kept(
    hanging: tuple[Store, FaultyEngine],
) -> None:
    store, engine = hanging
    end = time.monotonic() + PATIENCE_S
    while True:
        start = time.monotonic()
        result, forward, memory = reaching(engine, lambda: load_layers(store, deadline_s=DEADLINE_S))
        assert time.monotonic() - start < WAIT_S
        if len(forward.told[0][2]) == COUNT:  # there was time for the group before
            break
        assert time.monotonic() < end, "no call was in time with its first group"
    assert result.reasons() == {"MISS_DEADLINE": COUNT}
    assert result.memory_in_use
    assert [(first, last) for first, last, _ in forward.told] == GROUPS
    assert [len(pages) for _, _, pages in forward.told] == [COUNT, 0, 0]
    before = memory.raw.copy()
    arena = store.moving().staging.arena()
    assert arena.stats().quarantined_bytes > 0
    engine.release_hangs()
    end = time.monotonic() + WAIT_S
    while result.memory_in_use and time.monotonic() < end:
        time.sleep(0.01)
    store.sweep()
    assert np.array_equal(memory.raw, before), "the memory was touched after the deadline"
    arena.lease(arena.size_bytes, 10).release()  # every byte can be had again
    assert bind(store).contains(KEYS).all()  # late is not damaged


def test_a_cancelled_load_begins_nothing_more_and_still_tells_of_every_layer(stored: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    told: list[tuple[int, int, int]] = []

    def on_layers(first: int, last: int, ok: Mask) -> None:
        told.append((first, last, int(ok.sum())))
        begun.set()
        assert go_on.wait(WAIT_S)

    with small_store(stored, staging_bytes="64KiB", chunk_bytes="64KiB", zero_copy=False) as store:
        memory = PieceMemory(COUNT, LAYOUT.page_bytes)
        future = bind(store).load_layers(KEYS, memory.pieces(), on_layers, groups=GROUPS)
        assert begun.wait(WAIT_S)
        future.cancel()
        go_on.set()
        result = future.result(WAIT_S)
        assert result.count(PageStatus.MISS_CANCELLED) > 0
        assert set(result.reasons()) <= {"MISS_CANCELLED", "LOADED"}
        assert [(first, last) for first, last, _ in told] == GROUPS
        assert told[-1][2] == result.count(PageStatus.LOADED)
        assert not result.memory_in_use


def test_a_call_whose_time_is_over_touches_nothing_and_tells_of_every_layer(stored: Path) -> None:
    with small_store(stored) as store:
        result, forward, memory = load_layers(store, deadline_s=0.0)
        assert result.reasons() == {"MISS_DEADLINE": COUNT}
        assert forward.told[-1][1] == LAYOUT.layers
        assert not any(pages for _, _, pages in forward.told)
        assert (memory.raw == FILL).all()


class BeforeRead(PosixEngine):
    """Does something once, just before the first read starts."""

    work: Callable[[], None] | None = None

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        if op is Op.READ and self.work is not None:
            work, self.work = self.work, None
            work()
        return super().submit(op, plan)


@pytest.mark.parametrize("verify", [True, False])
def test_a_page_whose_place_is_given_away_while_it_is_read_is_a_miss(path: Path, verify: bool) -> None:
    engine = BeforeRead(2)
    with small_store(path, own_engine=engine, capacity="16MiB", verify=verify) as store:
        namespace = bind(store)
        assert save(namespace, KEYS, LAYOUT.page_bytes).all_ok

        def give_away() -> None:
            for turn in range(10):
                assert save(namespace, make_keys(30, turn), LAYOUT.page_bytes).all_ok

        engine.work = give_away
        result, forward, _ = load_layers(store)
        assert result.reasons() == {"MISS_RECLAIMED": COUNT}
        assert [(first, last) for first, last, _ in forward.told] == GROUPS
        assert store.stats().get("damaged_pages", 0) == 0

"""What a call says of its pages is so, and nothing stays taken, even where an engine or a checksum breaks its rules and raises."""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gdsstore import Store
from gdsstore.engines.base import Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.transfer.host_side import HostSide
from tests.store.helpers import WAIT_S, make_keys, memory_directory, small_store, truth
from tests.transfer.layered_rig import (
    GROUPS,
    LAYOUT,
    PieceMemory,
    assert_loaded_is_true,
    bind,
    load_layers,
)
from tests.transfer.test_layered_save import Computing, assert_stored, start

COUNT = 40
KEYS = make_keys(COUNT, "truth")
ERRORS = [EngineError("broken"), DeadlineError("broken"), RuntimeError("broken"), MemoryError()]


class Raising(Transfer):
    """Ends well, and raises at the first look at its results."""

    def __init__(self, inner: Transfer, error: Exception) -> None:
        self._inner, self._error = inner, error
        self._raised = False

    @property
    def done(self) -> bool:
        return self._inner.done

    def wait(self, timeout_s: float) -> RangeResults:
        results = self._inner.wait(timeout_s)
        if not self._raised:
            self._raised = True
            raise self._error
        return results


class Breaking(FaultyEngine):
    """`bad`: which of its transfers raise what."""

    def __init__(self, bad: dict[int, Exception]) -> None:
        super().__init__(PosixEngine(2), (), 0)
        self.bad, self._number = bad, itertools.count()

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        inner, error = super().submit(op, plan), self.bad.get(next(self._number))
        return inner if error is None else Raising(inner, error)


def taken(store: Store) -> list[object]:
    """What calls have not given back."""
    arena = store.moving().staging.arena()
    with contextlib.suppress(DeadlineError):
        arena.lease(arena.size_bytes, 0.0).release()  # who needs bytes looks what is still in quarantine
    stats = arena.stats()
    return [
        not store._scheduler._policy.idle,
        sum(segment.outstanding for segment in store.pool._owned.values()),
        stats.leased_bytes,
        stats.quarantined_bytes,
    ]


def assert_nothing_is_taken(store: Store) -> None:
    end = time.monotonic() + WAIT_S / 4
    while any(taken(store)) and time.monotonic() < end:
        time.sleep(0.001)
        store.sweep()  # a transfer that raised may have been under way
    assert taken(store) == [False, 0, 0, 0]


BAD = st.dictionaries(st.integers(0, 12), st.sampled_from(ERRORS), min_size=1, max_size=3)


@settings(max_examples=15, deadline=None)
@given(bad=BAD, zero_copy=st.booleans(), layered=st.booleans())
@example(bad=dict.fromkeys(range(13), ERRORS[2]), zero_copy=False, layered=False)
@example(bad=dict.fromkeys(range(13), ERRORS[2]), zero_copy=True, layered=True)
def test_what_is_said_to_be_saved_is_there(bad: dict[int, Exception], zero_copy: bool, layered: bool) -> None:
    own, memory = Breaking(bad), Computing(LAYOUT, KEYS)
    memory.compute_all()
    with (
        memory_directory() as directory,
        small_store(
            directory / "s", own_engine=own, zero_copy=zero_copy, chunk_bytes="128KiB", staging_bytes="1MiB"
        ) as store,
    ):
        if layered:
            result = start(store, memory, KEYS, LAYOUT, GROUPS).result(WAIT_S)
        else:
            result = bind(store).save(KEYS, memory.pieces()).result(WAIT_S)
        own.bad = {}
        assert bind(store).contains(KEYS).tolist() == result.ok.tolist()
        if result.ok.any():
            assert_stored(store, KEYS[result.ok])
        assert_nothing_is_taken(store)


@settings(max_examples=15, deadline=None)
@given(bad=BAD, zero_copy=st.booleans(), layered=st.booleans())
def test_what_is_said_to_be_loaded_is_there(
    bad: dict[int, Exception], zero_copy: bool, layered: bool
) -> None:
    own = Breaking({})
    with (
        memory_directory() as directory,
        small_store(
            directory / "s", own_engine=own, zero_copy=zero_copy, chunk_bytes="128KiB", staging_bytes="1MiB"
        ) as store,
    ):
        assert bind(store).save(KEYS, truth(KEYS, LAYOUT.page_bytes)).result(WAIT_S).all_ok
        own.bad, own._number = bad, itertools.count()
        memory = PieceMemory(COUNT, LAYOUT.page_bytes)
        if layered:
            result, forward, memory = load_layers(store, KEYS, memory=memory)
            assert forward.told[0][0] == 0
            assert [last for _, last, _ in forward.told[:-1]] == [first for first, _, _ in forward.told[1:]]
            assert forward.told[-1][1] == LAYOUT.layers
            assert not forward.wrong
        else:
            result = bind(store).load(KEYS, memory.pieces()).result(WAIT_S)
        assert_loaded_is_true(result, KEYS, LAYOUT, memory)
        assert_nothing_is_taken(store)


@pytest.mark.parametrize("layered", [False, True])
def test_a_checksum_that_cannot_be_computed_fails_the_save_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, layered: bool
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    memory = Computing(LAYOUT, KEYS)
    memory.compute_all()
    with memory_directory() as directory, small_store(directory / "s") as store:
        with monkeypatch.context() as context:
            context.setattr(HostSide, "raw_checksums", full)
            if layered:
                result = start(store, memory, KEYS, LAYOUT, GROUPS).result(WAIT_S)
            else:
                result = bind(store).save(KEYS, memory.pieces()).result(WAIT_S)
        assert not result.ok.any()
        assert not bind(store).contains(KEYS).any()
        assert_nothing_is_taken(store)

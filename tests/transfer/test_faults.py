"""Whatever the drive does: never wrong bytes, never a hang, and a write that failed is never seen."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore import PageStatus
from gdsstore.engines.base import Engine, Op, RangePlan, Transfer
from gdsstore.engines.faulty import FaultKind
from gdsstore.engines.posix import PosixEngine
from tests.store.helpers import (
    check,
    forget_catalog,
    load,
    locate,
    make_keys,
    memory_directory,
    opaque,
    save,
    small_store,
    statuses,
    truth,
)
from tests.transfer.faults import fault, faulty

PAGE = 8192
KEYS = make_keys(200)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


MIXES = {
    "errno": [FaultKind.ERRNO],
    "short": [FaultKind.SHORT],
    "corrupt": [FaultKind.CORRUPT],
    "misdirect": [FaultKind.MISDIRECT],
    "delay": [FaultKind.DELAY],
    "everything": [kind for kind in FaultKind if kind is not FaultKind.HANG],
}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    mix=st.sampled_from(sorted(MIXES)),
    probability=st.sampled_from([0.01, 0.05, 0.3]),
    nbytes=st.sampled_from([8192, 5000, 50_000]),
    zero_copy=st.booleans(),
)
def test_no_mix_of_faults_gives_wrong_bytes(
    seed: int, mix: str, probability: float, nbytes: int, zero_copy: bool
) -> None:
    with memory_directory() as directory:
        _use_with_faults(directory / "s", seed, mix, probability, nbytes, zero_copy)


def _use_with_faults(
    path: Path, seed: int, mix: str, probability: float, nbytes: int, zero_copy: bool
) -> None:
    kinds = MIXES[mix]
    faults = [
        fault(kind, probability / len(kinds), **({"delay_s": 0.002} if kind is FaultKind.DELAY else {}))
        for kind in kinds
    ]
    keys = make_keys(60, seed)
    with small_store(
        path, own_engine=faulty(*faults, seed=seed), zero_copy=zero_copy, segment_bytes="2MiB"
    ) as store:
        namespace = opaque(store, nbytes)
        for _ in range(3):
            saved = save(namespace, keys, nbytes)
            assert set(saved.reasons()) <= {"SAVED", "ALREADY_THERE", "FAILED_IO"}
            result = check(namespace, keys, nbytes)  # compares every byte of every page that counts as loaded
            assert set(result.reasons()) <= {"LOADED", "MISS_ABSENT", "MISS_CHECKSUM", "MISS_IO"}
            assert not result.memory_in_use
        found = namespace.contains(keys)
    # What the faults left on the drive does no harm either, with the catalog or without it.
    for rebuilt in (False, True):
        if rebuilt:
            forget_catalog(path)
        with small_store(path) as store:
            namespace = opaque(store, nbytes)
            again = check(namespace, keys, nbytes)
            assert not (again.ok & ~found).any() or rebuilt
            assert save(namespace, keys, nbytes).all_ok
            assert check(namespace, keys, nbytes).all_ok


@pytest.mark.parametrize("kind", [FaultKind.ERRNO, FaultKind.SHORT])
def test_a_write_that_failed_is_never_seen(path: Path, kind: FaultKind) -> None:
    engine = faulty(fault(kind, 0.3, op=Op.WRITE))
    with small_store(path, own_engine=engine, chunk_bytes="64KiB") as store:
        namespace = opaque(store)
        result = save(namespace, KEYS)
        assert 0 < result.count(PageStatus.FAILED_IO) < len(KEYS)
        assert np.array_equal(namespace.contains(KEYS), result.ok)
        assert np.array_equal(check(namespace, KEYS).ok, result.ok)
    forget_catalog(path)
    with small_store(path) as store:
        assert np.array_equal(opaque(store).contains(KEYS), result.ok)
        assert np.array_equal(check(opaque(store), KEYS).ok, result.ok)


class Meanwhile(Engine):
    """Does something once, just before the first read starts."""

    name = "meanwhile"

    def __init__(self) -> None:
        self._inner = PosixEngine(2)
        self.work: Callable[[], None] | None = None
        self.attach, self.detach = self._inner.attach, self._inner.detach  # type: ignore[method-assign]
        self.close = self._inner.close  # type: ignore[method-assign]

    def attach(self, fd: int, size: int) -> None: ...
    def detach(self, fd: int) -> None: ...
    def close(self, timeout_s: float) -> None: ...

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        if op is Op.READ and self.work is not None:
            work, self.work = self.work, None
            work()
        return self._inner.submit(op, plan)


@pytest.mark.parametrize("verify", [True, False])
def test_a_page_whose_place_is_given_away_while_it_is_read_is_a_miss(path: Path, verify: bool) -> None:
    """Between look-up and read its segment is reclaimed and filled with other pages, of the same namespace and size."""
    engine = Meanwhile()
    with small_store(path, own_engine=engine, capacity="16MiB", verify=verify) as store:
        namespace = opaque(store)
        assert save(namespace, KEYS).all_ok

        def give_away() -> None:
            for turn in range(10):
                assert save(namespace, make_keys(200, turn)).all_ok

        engine.work = give_away
        result = check(namespace, KEYS)
        assert result.reasons() == {"MISS_RECLAIMED": 200}
        assert store.stats().get("damaged_pages", 0) == 0
        assert check(namespace, KEYS).reasons() == {"MISS_ABSENT": 200}
        assert check(namespace, make_keys(200, 9)).all_ok  # nothing of theirs was dropped


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_drive_that_is_out_of_space_is_told_from_one_that_fails(path: Path, code: int) -> None:
    """Copy-on-write filesystems can run out of space where a file is overwritten."""
    with small_store(path, own_engine=faulty(fault(FaultKind.ERRNO, op=Op.WRITE, errno_code=code))) as store:
        assert save(opaque(store), KEYS).reasons() == {"FAILED_NO_SPACE": 200}
        assert not opaque(store).contains(KEYS).any()


def test_an_error_that_passes_is_tried_again_and_not_seen(path: Path) -> None:
    engine = faulty(fault(FaultKind.ERRNO, limit=1), fault(FaultKind.SHORT, limit=1))
    with small_store(path, own_engine=engine, chunk_bytes="64KiB") as store:
        assert save(opaque(store), KEYS).all_ok
        assert check(opaque(store), KEYS).all_ok
        assert store.stats()["io_retries"] > 0
        assert engine.injected["errno"] == engine.injected["short"] == 1


def test_an_error_in_a_merged_request_hits_only_the_page_it_belongs_to(path: Path) -> None:
    with small_store(path) as store:
        namespace = opaque(store)
        assert save(namespace, KEYS).all_ok
        segment, offsets = locate(namespace, KEYS[:100])
        assert len(set(segment)) == 1  # so that the offset alone says which page a request holds
        bad = offsets[17]
    covers = fault(
        FaultKind.ERRNO,
        op=Op.READ,
        match=lambda plan: (plan.file_offset <= bad) & (bad < plan.file_offset + plan.length),
    )
    with small_store(path, own_engine=faulty(covers)) as store:
        result, memory = load(opaque(store), KEYS[:100])
        assert [i for i, status in enumerate(statuses(result)) if status != "LOADED"] == [17]
        assert statuses(result)[17] == "MISS_IO"
        assert np.array_equal(memory[result.ok], truth(KEYS[:100], PAGE)[result.ok])
        # The page was not dropped: the drive may answer the next time.
        assert opaque(store).contains(KEYS).all()


def test_a_corrupt_read_drops_the_page_and_a_corrupt_write_is_found_at_the_first_read(path: Path) -> None:
    with small_store(
        path, own_engine=faulty(fault(FaultKind.CORRUPT, op=Op.WRITE, limit=3)), chunk_bytes="64KiB"
    ) as store:
        namespace = opaque(store)
        assert save(namespace, KEYS).all_ok
        result = check(namespace, KEYS)
        assert result.reasons() == {"LOADED": 197, "MISS_CHECKSUM": 3}
        assert check(namespace, KEYS).reasons() == {"LOADED": 197, "MISS_ABSENT": 3}

"""What a drive does late never damages a page of somebody else."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest

from gdsstore import DeadlineError, Store
from gdsstore.directory import StoreDirectory
from gdsstore.engines.posix import PosixEngine
from gdsstore.verify.offline import read_only_volumes, verify_offline
from gdsstore.verify.payloads import PayloadReader
from gdsstore.verify.result import Verification
from tests.store.helpers import (
    U8,
    WAIT_S,
    check,
    forget_catalog,
    make_keys,
    opaque,
    small_config,
    small_store,
    truth,
)
from tests.transfer.late_drive import CALLS, LateDrive, soon

ROUNDS = 40


def open_two(path: Path) -> Store:
    return small_store(
        [path / "s", path / "t"], durability="commit", capacity="200MiB", catalog_map_bytes="64MiB", workers=3
    )


def verified(path: Path) -> Verification:
    paths = [path / "s", path / "t"]
    directory = StoreDirectory(paths[0])
    volumes = read_only_volumes(directory, paths)
    with PayloadReader(PosixEngine(2), volumes, directory.read().segment_bytes, small_config()) as reader:
        return verify_offline(directory, volumes, reader)


class Rounds:
    """Saves, three at a time, of which some hang at some point; the drives answer again now and then."""

    def __init__(self, path: Path, drives: list[LateDrive], seed: int) -> None:
        self._path, self._drives, self._seed = path, drives, seed
        self._rng = random.Random(seed)
        self.promised: list[U8] = []
        self._store = open_two(path)

    def run(self) -> None:
        try:
            for number in range(ROUNDS):
                if self._rng.random() < 0.3:
                    self._rng.choice(self._drives).armed = self._rng.randrange(1, 3)
                self._save(number)
                if self._rng.random() < 0.4:
                    self._release()
                if self._rng.random() < 0.05:
                    for drive in self._drives:
                        drive.armed = 0  # opening waits for a drive
                    self._close(0.2)
                    self._store = open_two(self._path)
        finally:
            self._release()
            self._close(WAIT_S)

    def _save(self, number: int) -> None:
        pages = opaque(self._store)
        hangs = any(drive.armed or drive.waiting for drive in self._drives)
        futures = []
        for part in range(3):
            keys = make_keys(self._rng.randrange(1, 30), (self._seed, number, part))
            deadline_s = self._rng.choice([0.05, 0.2, 0.1 if hangs else WAIT_S])
            futures.append((keys, pages.save(keys, truth(keys, 8192), deadline_s=deadline_s)))
        for keys, future in futures:
            ok = future.result(WAIT_S).ok
            assert (pages.contains(keys) == ok).all()
            self.promised.append(keys[ok])

    def _release(self) -> None:
        for drive in self._drives:
            drive.release()

    def _close(self, timeout_s: float) -> None:
        with contextlib.suppress(DeadlineError):
            self._store.close(timeout_s)


@pytest.mark.parametrize("seed", range(4))
def test_promised_pages_outlive_every_late_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drives = [
        LateDrive(monkeypatch, name, tmp_path / volume / "segments") for name in CALLS for volume in "st"
    ]
    rounds = Rounds(tmp_path, drives, seed)
    rounds.run()
    soon(lambda: not any(drive.waiting for drive in drives))
    assert sum(drive.begun for drive in drives) > 3
    promised = np.concatenate(rounds.promised)
    assert len(promised) > 100
    assert verified(tmp_path).damaged == []
    with open_two(tmp_path) as again:
        assert check(opaque(again), promised).all_ok
    forget_catalog(tmp_path / "s")
    with open_two(tmp_path) as rebuilt:
        assert check(opaque(rebuilt), promised).all_ok

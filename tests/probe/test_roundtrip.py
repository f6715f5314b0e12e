"""The round trip tells the truth, and leaves nothing behind."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gdsstore.engines.base import Engine, Op
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import MissingExtraError
from gdsstore.probe import roundtrip
from gdsstore.probe.roundtrip import round_trip
from gdsstore.probe.trips import IoPath, Outcome
from gdsstore.sizes import MiB
from gdsstore.volume.direct import probe_direct


def through(monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> FaultyEngine:
    engine = FaultyEngine(PosixEngine(2), faults, seed=0)

    def make(name: str, *, posix_threads: int, in_flight_ranges: int) -> Engine:
        return engine

    monkeypatch.setattr(roundtrip, "make_engine", make)
    return engine


def test_bytes_come_back_and_no_file_stays(tmp_path: Path) -> None:
    trip = round_trip("posix", tmp_path, o_direct=probe_direct(tmp_path).direct, total_bytes=3 * MiB + 4096)
    assert (trip.outcome, trip.nbytes, trip.engine) == (Outcome.WORKS, 3 * MiB + 4096, "posix")
    assert (trip.path, trip.device) == (IoPath.HOST, None)
    assert trip.write_gbps is not None
    assert trip.read_gbps is not None
    assert min(trip.write_gbps, trip.read_gbps) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("op", list(Op))
def test_a_flipped_bit_is_a_failure(op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through(monkeypatch, Fault(FaultKind.CORRUPT, op=op, limit=1))
    trip = round_trip("posix", tmp_path, o_direct=False, total_bytes=4 * MiB)
    assert trip.outcome is Outcome.FAILED
    assert "not what was written" in str(trip.detail)


def test_an_error_of_the_drive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through(monkeypatch, Fault(FaultKind.ERRNO, op=Op.READ, errno_code=errno.EIO, limit=1))
    trip = round_trip("posix", tmp_path, o_direct=False, total_bytes=4 * MiB)
    assert trip.outcome is Outcome.FAILED
    assert "1 of 4 ranges failed to read: Input/output error" in str(trip.detail)


def test_a_drive_that_hangs_ends_in_time_and_its_memory_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = through(monkeypatch, Fault(FaultKind.HANG, op=Op.WRITE, limit=1))
    monkeypatch.setattr(roundtrip, "DEADLINE_S", 0.2)
    kept: list[object] = []
    monkeypatch.setattr(roundtrip, "_left_behind", kept)
    monkeypatch.setattr(FaultyEngine, "__exit__", lambda self, *_: self.close(0.1))
    trip = round_trip("posix", tmp_path, o_direct=False, total_bytes=2 * MiB)
    assert trip.outcome is Outcome.FAILED
    assert len(kept) == 2, "the kernel may still write there"
    assert list(tmp_path.iterdir()) == []
    engine.release_hangs()


def test_an_engine_that_is_not_installed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, *, posix_threads: int, in_flight_ranges: int) -> Engine:
        raise MissingExtraError("nixl", "nixl", "the nixl engine")

    monkeypatch.setattr(roundtrip, "make_engine", missing)
    trip = round_trip("nixl", tmp_path, o_direct=False)
    assert (trip.outcome, trip.engine) == (Outcome.NOT_INSTALLED, "nixl")
    assert "pip install" in str(trip.detail)


def test_a_directory_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    assert round_trip("posix", tmp_path / "gone", o_direct=False).outcome is Outcome.FAILED

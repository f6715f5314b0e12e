"""By which path bytes are said to have gone, given what each try in a process of its own said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gdsstore.probe import device_trips
from gdsstore.probe.child import Said
from gdsstore.probe.device_trips import TOTAL_BYTES, device_round_trip
from gdsstore.probe.facts import CuFileDriver, MachineFacts
from gdsstore.probe.trips import IoPath, Outcome, PathBytes, Trip
from gdsstore.sizes import MiB
from tests.probe.machines import machine

P2P = machine("p2pdma-healthy")
ALL = PathBytes(direct=64 * MiB)
DIRECT = Trip(
    "kvikio",
    Outcome.WORKS,
    device=0,
    path=IoPath.DIRECT,
    nbytes=64 * MiB,
    o_direct=True,
    written=ALL,
    read=ALL,
)
REFUSED = Trip("kvikio", Outcome.FAILED, "a file was refused", device=0)

Tries = list[dict[str, Any]]


def says(trip: Trip, *, hung: bool = False) -> Said:
    return Said((json.dumps({"stage": "the read"}), json.dumps({"trip": asdict(trip), "hung": hung})), 0)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tries]:
    """Lets the processes say the given, in this order, and writes down how each was started."""
    monkeypatch.delenv("CUFILE_ALLOW_COMPAT_MODE", raising=False)

    def prepare(*answers: Said) -> Tries:
        made: Tries = []

        def ask(arguments: list[str], timeout_s: float, environ: dict[str, str]) -> Said:
            job = json.loads(arguments[-1])
            content = Path(job["file"]).read_bytes()
            made.append({**job, "strict": environ.get("CUFILE_ALLOW_COMPAT_MODE"), "content": len(content)})
            return answers[len(made) - 1]

        monkeypatch.setattr(device_trips, "ask", ask)
        return made

    return prepare


def with_config(**fields: Any) -> MachineFacts:
    return replace(P2P, cufile=replace(P2P.cufile, config=replace(P2P.cufile.config, **fields)))


def test_what_is_direct_while_cufile_must_not_fall_back_is_direct(tries: Any, tmp_path: Path) -> None:
    made = tries(says(DIRECT))
    assert device_round_trip("kvikio", tmp_path, P2P) == DIRECT
    (job,) = made
    assert (job["strict"], job["engine"], job["o_direct"]) == ("false", "kvikio", True)
    assert job["content"] == TOTAL_BYTES  # all of it was written: sparse files are refused on the direct path
    assert list(tmp_path.iterdir()) == []


def test_what_works_only_with_the_fallback_was_not_direct_whatever_was_counted(
    tries: Any, tmp_path: Path
) -> None:
    made = tries(says(REFUSED), says(DIRECT))
    trip = device_round_trip("kvikio", tmp_path, P2P)
    assert trip is not None
    assert (trip.outcome, trip.path, trip.detail) == (
        Outcome.WORKS,
        IoPath.COMPAT,
        "direct was refused: a file was refused",
    )
    assert [each["strict"] for each in made] == ["false", None]


def test_what_the_engine_counts_as_compat_is_compat(tries: Any, tmp_path: Path) -> None:
    made = tries(says(replace(DIRECT, path=IoPath.COMPAT)))
    trip = device_round_trip("kvikio", tmp_path, P2P)
    assert trip is not None
    assert (trip.outcome, trip.path) == (Outcome.WORKS, IoPath.COMPAT)
    assert "no direct route" in str(trip.detail)
    assert len(made) == 1


def test_a_file_without_direct_io_is_never_called_direct(tries: Any, tmp_path: Path) -> None:
    tries(says(DIRECT))
    facts = replace(P2P, storage=replace(P2P.storage, o_direct=False))
    trip = device_round_trip("nixl-gds-mt", tmp_path, facts)
    assert trip is not None
    assert (trip.path, trip.detail) == (IoPath.COMPAT, "direct I/O is refused")


def test_a_forced_fallback_is_never_called_direct(tries: Any, tmp_path: Path) -> None:
    made = tries(says(DIRECT))
    trip = device_round_trip("kvikio", tmp_path, with_config(force_compat_mode=True))
    assert trip is not None
    assert (trip.path, made[0]["strict"]) == (IoPath.COMPAT, None)


def test_a_fallback_that_is_not_allowed_is_not_tried(tries: Any, tmp_path: Path) -> None:
    made = tries(says(REFUSED))
    assert device_round_trip("kvikio", tmp_path, with_config(allow_compat_mode=False)) == REFUSED
    assert len(made) == 1


def test_a_hang_is_not_tried_again(tries: Any, tmp_path: Path) -> None:
    made = tries(says(REFUSED, hung=True))
    assert device_round_trip("kvikio", tmp_path, P2P) == REFUSED
    assert len(made) == 1


def test_a_process_that_was_killed_is_told_with_its_stage(tries: Any, tmp_path: Path) -> None:
    made = tries(Said((json.dumps({"stage": "the write"}),), None))
    trip = device_round_trip("kvikio", tmp_path, P2P)
    assert trip is not None
    assert (trip.outcome, trip.path, trip.device) == (Outcome.FAILED, None, 0)
    assert "was killed, during the write" in str(trip.detail)
    assert len(made) == 1


def test_a_crash_is_a_failure_and_cufile_s_log_says_more(tries: Any, tmp_path: Path) -> None:
    tries(Said((), -11, "cufio-fs:2 no volume"), Said((), -11))
    trip = device_round_trip("kvikio", tmp_path, P2P)
    assert trip is not None
    assert "died (exit code -11), during its start (cufile.log: cufio-fs:2 no volume)" in str(trip.detail)


def test_bounce_is_tried_once_as_it_is(tries: Any, tmp_path: Path) -> None:
    bounced = replace(DIRECT, engine="bounce", path=IoPath.BOUNCE)
    made = tries(says(bounced))
    assert device_round_trip("bounce", tmp_path, P2P) == bounced
    assert made[0]["strict"] is None


def test_an_engine_that_is_not_installed_is_not_tried_again(tries: Any, tmp_path: Path) -> None:
    absent = Trip("kvikio", Outcome.NOT_INSTALLED, "pip install", device=0)
    made = tries(says(absent))
    assert device_round_trip("kvikio", tmp_path, P2P) == absent
    assert len(made) == 1


@pytest.mark.parametrize("name", ["virtio-vm", "fabric-manager-stopped"])
def test_without_a_gpu_that_can_be_used_nothing_is_tried(name: str, tries: Any, tmp_path: Path) -> None:
    made = tries()
    assert device_round_trip("kvikio", tmp_path, machine(name)) is None
    assert made == []


def test_a_driver_that_hangs_is_not_opened_once_more(tries: Any, tmp_path: Path) -> None:
    driver = CuFileDriver(error="cuFileDriverOpen did not return within 30 s", hung=True)
    facts = replace(P2P, cufile=replace(P2P.cufile, driver=driver))
    made = tries(says(replace(DIRECT, engine="bounce", path=IoPath.BOUNCE)))
    for engine in ("kvikio", "nixl-gds-mt"):
        trip = device_round_trip(engine, tmp_path, facts)
        assert trip is not None
        assert (trip.outcome, trip.detail) == (Outcome.FAILED, f"not tried: {driver.error}")
    assert made == []
    assert device_round_trip("bounce", tmp_path, facts) is not None  # needs no cuFile
    assert len(made) == 1


def test_a_directory_that_cannot_be_written_is_a_failure(tries: Any, tmp_path: Path) -> None:
    tries()
    trip = device_round_trip("kvikio", tmp_path / "gone", P2P)
    assert trip is not None
    assert trip.outcome is Outcome.FAILED

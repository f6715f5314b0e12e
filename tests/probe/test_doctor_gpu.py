"""`gdsstore doctor` with a GPU, end to end: the real kvikio and NIXL on the simulated one, in the processes that doctor starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gdsstore.cli import doctor as module
from gdsstore.probe import cufile, device_trips
from gdsstore.sizes import MiB
from gdsstore.volume.direct import probe_direct
from tests.cli.command import process, run, run_json
from tests.cudasim import simgpu
from tests.cudasim.fixtures import need

ANY_DELAY = "delay:3000000000"  # 3000 s: the test fails by its own time limit where doctor waits for that


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory with direct I/O; processes that are started from now on have a simulated GPU."""
    need("kvikio", "nixl", "nixl_cu13")
    if not probe_direct(tmp_path).direct:
        pytest.skip("needs a temporary directory with O_DIRECT: pytest --basetemp moves it")
    folder = simgpu.build()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("LD_PRELOAD", f"{folder}/libcuda.so.1:{folder}/libcufile.so.0")
    monkeypatch.setenv("CUDASIM_POISON", "238")
    return tmp_path


@pytest.fixture
def small(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, for a doctor in this process that moves little and tries only kvikio."""
    monkeypatch.setattr(module, "HOST_ENGINES", ())
    monkeypatch.setattr(module, "DEVICE_ENGINES", ("kvikio",))
    monkeypatch.setattr(device_trips, "TOTAL_BYTES", 4 * MiB)
    return simulated


def states(found: dict[str, Any]) -> dict[str, str]:
    return {each["path"]: each["state"] for each in found["verdicts"]}


def test_every_engine_is_tried_and_direct_is_direct(simulated: Path) -> None:
    """The real thing, in a process of its own."""
    done = process("doctor", simulated, "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    trips = {each["engine"]: each for each in found["round_trips"]}
    assert {name: (each["outcome"], each["path"], each["device"]) for name, each in trips.items()} == {
        "posix": ("works", "host", None),
        "nixl": ("works", "host", None),
        "kvikio": ("works", "direct", 0),
        "nixl-gds-mt": ("works", "direct", 0),
        "bounce": ("works", "bounce", 0),
    }
    for name, path in (("kvikio", "direct"), ("nixl-gds-mt", "direct"), ("bounce", "bounce")):
        counted = {"direct": 0, "compat": 0, "bounce": 0, path: 64 * MiB}
        assert (trips[name]["written"], trips[name]["read"]) == (counted, counted)
        assert min(trips[name]["write_gbps"], trips[name]["read_gbps"]) > 0
    assert states(found) == {
        "direct": "works",
        "compat": "works, not direct",
        "bounce": "works, not direct",
        "host": "works",
    }
    assert list(simulated.iterdir()) == []


def test_a_person_reads_which_path_the_bytes_took(small: Path) -> None:
    text = " ".join(run("doctor", small).stdout.split())
    assert "kvikio, GPU 0 │ direct │ works" in text
    assert "every byte of it direct" in text
    assert "The direct path works" in text


def test_cufile_s_own_compat_mode_is_told_and_is_not_direct(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEVICE_ENGINES", device_trips.CUFILE_ENGINES)
    monkeypatch.setenv("CUFILESIM_NVFS", "0")
    monkeypatch.setenv("CUFILESIM_COMPAT", "1")
    found = run_json("doctor", small, exit_code=1)
    for trip in found["round_trips"]:
        assert (trip["outcome"], trip["path"]) == ("works", "compat")
        assert trip["read"] == {"direct": 0, "compat": 4 * MiB, "bounce": 0}
    assert (states(found)["direct"], states(found)["compat"]) == ("does not work", "works, not direct")
    assert "direct-fell-back" in {each["code"] for each in found["findings"]}


def test_a_forced_fallback_is_not_direct_whatever_is_counted(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "true")
    found = run_json("doctor", small, exit_code=1)
    assert found["round_trips"][0]["path"] == "compat"
    assert states(found)["direct"] == "does not work"


def test_kvikio_s_own_compat_mode_changes_nothing_for_a_store(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    found = run_json("doctor", small, exit_code=0)
    assert found["round_trips"][0]["path"] == "direct"


def test_a_drive_that_errs_is_a_round_trip_that_failed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOST_ENGINES", ("posix",))
    monkeypatch.setenv("CUFILESIM_FAULTS", "cuFileRead=errno:5")
    found = run_json("doctor", small, exit_code=1)  # from host memory a store works all the same
    (trip,) = [each for each in found["round_trips"] if each["engine"] == "kvikio"]
    assert trip["outcome"] == "failed"
    assert "1 of 8 ranges failed" in trip["detail"]
    assert states(found) == {
        "direct": "does not work",
        "compat": "does not work",
        "bounce": "works, not direct",
        "host": "works",
    }


def test_bytes_that_are_short_are_a_round_trip_that_failed(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFILESIM_FAULTS", "cuFileWrite=short:4096")
    found = run_json("doctor", small, exit_code=1)
    assert found["round_trips"][0]["outcome"] == "failed"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("cuFileDriverOpen", "not tried: cuFileDriverOpen did not return"),
        ("cuFileBufRegister", "was killed, during the start of the engine"),
        ("cuFileWrite", "failed to write: Connection timed out"),
        ("cuFileRead", "failed to read: Connection timed out"),
        ("cuFileBufDeregister", "was killed, during the end of the engine"),
    ],
)
def test_doctor_ends_whatever_hangs(
    call: str, said: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFILESIM_FAULTS", f"{call}={ANY_DELAY}")
    monkeypatch.setattr(device_trips, "DEADLINE_S", 4.0)
    if call == "cuFileDriverOpen":
        monkeypatch.setattr(cufile, "DRIVER_DEADLINE_S", 1.0)
    if "killed" in said:
        monkeypatch.setattr(device_trips, "PROCESS_S", 15.0)
    found = run_json("doctor", small, exit_code=1)
    (trip,) = found["round_trips"]
    assert trip["outcome"] == "failed"
    assert said in trip["detail"]
    assert states(found)["direct"] == "does not work"
    assert list(small.iterdir()) == []


def test_a_driver_without_a_gpu_is_no_gpu(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASIM_NO_DEVICE", "1")
    found = run_json("doctor", small, exit_code=1)
    assert found["round_trips"] == []
    assert {each["reason"] for each in found["verdicts"][1:3]} == {"There is no usable GPU."}

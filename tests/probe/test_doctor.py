"""`gdsstore doctor`: exit codes, JSON, and what a person reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gdsstore.cli import doctor as module
from gdsstore.cli.output import Output
from gdsstore.probe.advice import IoPath, State
from gdsstore.probe.facts import MachineFacts
from gdsstore.probe.trips import Outcome, Trip
from tests.cli.command import process, run, run_json
from tests.cli.test_docs import section
from tests.probe.machines import FOLDER, NAMES, machine
from tests.probe.test_machines import EXPECTED

FIELDS = {"verdicts", "findings", "round_trips", "facts", "exit_code"}


WORKS = Trip("posix", Outcome.WORKS, nbytes=1 << 20, o_direct=True, write_gbps=1.0, read_gbps=1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round trip, which test_roundtrip.py and test_device_trips.py test."""
    monkeypatch.setattr(module, "round_trip", lambda *_, **__: WORKS)
    monkeypatch.setattr(module, "DEVICE_ENGINES", ())


def expected_exit(name: str) -> int:
    direct, _, _, host = EXPECTED[name][0]
    return 2 if host is State.DOES_NOT else 0 if direct is State.WORKS else 1


@pytest.mark.parametrize("name", NAMES)
def test_recorded_facts_are_judged_with_the_exit_code(name: str) -> None:
    found = run_json("doctor", "--facts", FOLDER / f"{name}.json", exit_code=expected_exit(name))
    assert [each["state"] for each in found["verdicts"]] == [state.value for state in EXPECTED[name][0]]
    assert found["exit_code"] == expected_exit(name)
    # What was tried there; nothing is tried on this machine for another one.
    assert found["round_trips"] == [each.to_dict() for each in machine(name).round_trips]
    assert set(found) == FIELDS


def test_this_machine_without_a_gpu_works_but_not_direct(tmp_path: Path) -> None:
    """The real thing, in a process of its own: round trips included."""
    done = process("doctor", tmp_path, "--json", "-")
    found = json.loads(done.stdout)
    facts = MachineFacts.from_dict(found["facts"])
    if not facts.nvidia.gpus:
        assert done.returncode == 1
    assert done.returncode == found["exit_code"]
    assert set(found) == FIELDS
    assert [each["path"] for each in found["verdicts"]] == [path.value for path in IoPath]
    posix = found["round_trips"][0]
    assert (posix["engine"], posix["outcome"]) == ("posix", "works")
    host_engines = [each["engine"] for each in found["round_trips"] if each["device"] is None]
    assert host_engines == ["posix", "nixl"]
    assert found["facts"]["round_trips"] == found["round_trips"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_saved_facts_are_judged_like_the_machine(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    code = run("doctor", there, "--quiet", "--save-facts", tmp_path / "facts.json").exit_code
    saved = run_json("doctor", "--facts", tmp_path / "facts.json", exit_code=code)
    assert saved["facts"]["storage"]["path"] == str(there)
    assert [each["engine"] for each in saved["round_trips"]] == ["posix", "posix"]


@pytest.mark.usefixtures("quick")
def test_the_result_of_json_can_be_judged_again(tmp_path: Path) -> None:
    run("doctor", tmp_path, "--json", tmp_path / "result.json")
    again = run("doctor", "--facts", tmp_path / "result.json", "--quiet")
    assert again.exit_code == json.loads((tmp_path / "result.json").read_text())["exit_code"]


def test_a_person_reads_what_to_do() -> None:
    text = run("doctor", "--facts", FOLDER / "ext4-without-data-ordered.json").stdout
    assert "mount -o data=ordered /dev/nvme0n1 /mnt/nvme" in text
    assert "What it costs:" in text
    assert "First step:" in text
    assert "DALI#3972" in text
    assert "does not work" in text


@pytest.mark.usefixtures("quick")
def test_quiet_says_nothing(tmp_path: Path) -> None:
    result = run("doctor", tmp_path, "--quiet")
    assert result.stdout == ""
    assert result.stderr == ""


def test_a_failed_round_trip_is_a_store_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Trip("posix", Outcome.FAILED, "Input/output error")
    monkeypatch.setattr(module, "round_trip", lambda *_, **__: failed)
    found = run_json("doctor", tmp_path, exit_code=2)
    assert {each["state"] for each in found["verdicts"]} == {"does not work"}
    assert "Input/output error" in found["verdicts"][0]["reason"]


def test_nixl_failing_alone_is_no_failure_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module,
        "round_trip",
        lambda name, *_, **__: Trip(name, Outcome.FAILED if name == "nixl" else Outcome.WORKS, "no io_uring"),
    )
    assert run("doctor", tmp_path, "--quiet").exit_code in (0, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/gone"], "PATH must be a directory"),
        (["--facts", "/gone.json"], "cannot read the facts"),
        (["/tmp", "--facts", "/gone.json"], "not both"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], said: str) -> None:
    result = run("doctor", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert said in result.stderr


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ('{"kernle": {}}', "no field 'kernle'")])
def test_facts_that_are_none_are_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(text)
    result = run("doctor", "--facts", tmp_path / "facts.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_can_be_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = replace(machine(name), round_trips=(*machine(name).round_trips, WORKS))
    found, judged = module.findings(facts), module.verdicts(facts)
    Output(None, False).show(module._view(facts, judged, found, 1), {})
    text = capsys.readouterr().out
    if not facts.nvidia.gpus:
        assert "With GPU memory nothing was tried. There is no usable GPU." in text
    for each in found:
        assert each.title in text


def test_the_page_names_every_field_of_the_result() -> None:
    assert {field for field in FIELDS if f"`{field}`" not in section("doctor")} == set()

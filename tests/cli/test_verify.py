"""`gdsstore verify`: exit codes, the list that names what is damaged, and a repair after which all is well."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import PAGE_BYTES, filled_store, process, run, run_json
from tests.store.helpers import flip, load, make_keys, opaque, segments, small_store, start_python, truth

DATA_OFFSET = 8192  # of segments of 1 MiB with slots of 64 KiB
SLOT = 3


def payload(path: Path) -> None:
    flip(path, 8 * (DATA_OFFSET + SLOT * PAGE_BYTES + 1000))


def table_entry(path: Path) -> None:
    flip(path, 8 * (4096 + SLOT * 128 + 50))


def superblock(path: Path) -> None:
    flip(path, 8 * 40)


def magic(path: Path) -> None:
    flip(path, 0)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(500_000)


def remove(path: Path) -> None:
    path.unlink()


Harm = Callable[[Path], None]
EVERY = [
    pytest.param(payload, "payload", 1, id="payload"),
    pytest.param(table_entry, "entry", 1, id="entry"),
    pytest.param(superblock, "superblock", 15, id="superblock"),
    pytest.param(magic, "superblock", 15, id="magic"),
    pytest.param(cut, "truncated", 15, id="truncated"),
    pytest.param(remove, "missing", 15, id="missing"),
]


def test_a_sound_store_is_clean_and_every_page_was_read(tmp_path: Path) -> None:
    found = run_json("verify", "--store", filled_store(tmp_path / "s"))
    assert found["clean"] is True
    assert (found["mode"], found["segments"], found["pages_checked"]) == ("online", 3, 40)
    assert found["bytes_checked"] == 40 * PAGE_BYTES
    assert found["damaged"] == found["left_out"] == []
    assert found["gbps"] > 0


@pytest.mark.parametrize(("harm", "kind", "pages"), EVERY)
def test_damage_is_exit_code_1_and_names_the_file(harm: Harm, kind: str, pages: int, tmp_path: Path) -> None:
    victim = segments(filled_store(tmp_path / "s"))[1]
    harm(victim)
    found = run_json("verify", "--store", tmp_path / "s", exit_code=1)
    (damage,) = found["damaged"]
    assert (damage["file"], damage["kind"], damage["pages"]) == (str(victim), kind, pages)
    assert damage["slot"] == (SLOT if pages == 1 else None)
    if kind == "payload":
        assert damage["key"] == make_keys(40)[15 + SLOT].tobytes().hex()
    if pages == 15:
        assert found[f"segments_{kind}"] == 1
        assert found["pages_checked"] == 25


@pytest.mark.parametrize(("harm", "kind", "pages"), EVERY)
def test_after_a_repair_the_store_is_clean_and_the_page_is_a_miss(
    harm: Harm, kind: str, pages: int, tmp_path: Path
) -> None:
    harm(segments(filled_store(tmp_path / "s"))[1])
    found = run_json("verify", "--store", tmp_path / "s", "--repair")
    assert (found["damage_found"], found["damage_repaired"]) == (1, 1)
    assert run_json("verify", "--store", tmp_path / "s")["clean"] is True
    keys = make_keys(40)
    lost = keys[15 + SLOT : 16 + SLOT] if pages == 1 else keys[15:30]
    for catalog_is_there in (True, False):  # nor does a rebuild bring it back
        if not catalog_is_there:
            (tmp_path / "s" / "catalog" / "data.mdb").unlink()
        with small_store(tmp_path / "s") as store:
            namespace = opaque(store, PAGE_BYTES)
            assert not namespace.contains(lost).any()
            result, memory = load(namespace, keys, PAGE_BYTES)
            assert result.ok.sum() == 40 - pages
            assert (memory[result.ok] == truth(keys, PAGE_BYTES)[result.ok]).all()


@pytest.mark.parametrize(("harm", "kind", "pages"), [each for each in EVERY if each.id != "missing"])
def test_offline_finds_the_same_and_writes_nothing(harm: Harm, kind: str, pages: int, tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    assert run_json("verify", "--store", store, "--offline")["pages_checked"] == 40
    victim = segments(store)[1]
    harm(victim)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    found = run_json("verify", "--store", store, "--offline", exit_code=1)
    (damage,) = found["damaged"]
    assert (found["mode"], damage["file"], damage["kind"]) == ("offline", str(victim), kind)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_offline_after_a_repair_is_clean_too(tmp_path: Path) -> None:
    for harm in (payload, table_entry):
        store = filled_store(tmp_path / harm.__name__)
        harm(segments(store)[1])
        run_json("verify", "--store", store, "--repair")
        assert run_json("verify", "--store", store, "--offline")["pages_checked"] == 39


def test_offline_needs_no_catalog(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    for path in (store / "catalog").iterdir():
        path.write_bytes(b"not a catalog")
    assert run_json("verify", "--store", store, "--offline")["pages_checked"] == 40


def test_offline_is_refused_while_somebody_uses_the_store(tmp_path: Path) -> None:
    other = start_python(
        """
        with small_store(Path(sys.argv[1])) as store:
            print("ready", flush=True)
            sys.stdin.readline()
        """,
        filled_store(tmp_path / "s"),
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        result = run("verify", "--store", tmp_path / "s", "--offline")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert "in use" in result.stderr
    finally:
        other.communicate("\n", timeout=60)
    assert run("verify", "--store", tmp_path / "s", "--offline").exit_code == 0


def test_offline_and_repair_together_are_refused(tmp_path: Path) -> None:
    result = run("verify", "--store", filled_store(tmp_path / "s"), "--offline", "--repair")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_a_segment_that_was_given_up_is_told_but_no_new_damage(tmp_path: Path) -> None:
    victim = segments(filled_store(tmp_path / "s"))[0]
    superblock(victim)
    run("verify", "--store", tmp_path / "s", "--repair")
    found = run_json("verify", "--store", tmp_path / "s")
    assert [each["file"] for each in found["left_out"]] == [str(victim)]
    assert f"{victim}: given up earlier" in run("verify", "--store", tmp_path / "s").stdout


def test_people_get_a_list_and_programs_json_from_a_process(tmp_path: Path) -> None:
    victim = segments(filled_store(tmp_path / "s"))[1]
    payload(victim)
    done = process("verify", "--store", tmp_path / "s")
    assert done.returncode == 1
    key = make_keys(40)[15 + SLOT].tobytes().hex()
    assert f"{victim}: slot {SLOT} the payload does not have its checksum, key {key}\n" in done.stdout
    assert "Traceback" not in done.stderr
    done = process("verify", "--store", tmp_path / "s", "--repair", "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["damage_repaired"] == 1

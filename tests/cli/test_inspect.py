"""`gdsstore inspect` and `stats` show what is there, also while others use it, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import PAGE_BYTES, filled_store, run, run_json
from tests.store.helpers import check, make_keys, opaque, save, segments, small_store, start_python


def test_volumes_segments_and_pages_are_counted(tmp_path: Path) -> None:
    found = run_json("inspect", "--store", filled_store(tmp_path / "s"))
    assert found["store"]["pages"] == 40
    assert 0 < found["store"]["physical_bytes"] <= found["store"]["capacity_bytes"] == 64 << 20
    assert found["states"]["sealed"]["segments"] == 2
    assert found["states"]["open"]["segments"] == 1
    assert found["states"]["open"]["fill"] == pytest.approx(10 / 15)
    (volume,) = found["volumes"]
    assert volume["path"] == str(tmp_path / "s")
    assert volume["segments"] == 3
    assert volume["free_bytes"] > 0
    assert "segments" not in found


def test_namespaces_show_what_their_digest_stands_for(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        first, second = opaque(store, PAGE_BYTES), opaque(store, 8192, pool="other")
        save(first, make_keys(7), PAGE_BYTES)
        save(second, make_keys(3), 8192)
    found = run_json("inspect", "--store", tmp_path / "s")["namespaces"]
    assert [(each["namespace"], each["pages"], each["payload_bytes"]) for each in found] == [
        (first.digest.hex(), 7, 7 * PAGE_BYTES),
        (second.digest.hex(), 3, 3 * 8192),
    ]
    assert [each["describes"]["pool"] for each in found] == ["kv", "other"]


def test_segments_are_listed_with_their_fill_and_age(tmp_path: Path) -> None:
    found = run_json("inspect", "--store", filled_store(tmp_path / "s"), "--segments")["segments"]
    assert [each["file"] for each in found] == [str(path) for path in segments(tmp_path / "s")]
    assert [(each["slots"], each["filled"], each["pages"]) for each in found] == [
        (15, 15, 15),
        (15, 15, 15),
        (15, 10, 10),
    ]
    assert all(0 <= each["youngest_s"] <= each["age_s"] < 3600 for each in found)


def test_the_hottest_pages_are_those_that_were_used_last(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    keys = make_keys(40)
    with small_store(tmp_path / "s") as store:
        for row in store._segments():
            store.heat._stamps[row.segment_id] -= 640  # all pages were used ten seconds ago
        assert opaque(store, PAGE_BYTES).contains(keys[20:23]).all()
    found = run_json("inspect", "--store", tmp_path / "s", "--keys", 3)["hottest"]
    assert {each["key"] for each in found} == {key.tobytes().hex() for key in keys[20:23]}
    assert run_json("inspect", "--store", tmp_path / "s", "--keys", 0)["hottest"] == []


def test_deleted_pages_are_not_counted(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    with small_store(tmp_path / "s") as store:
        opaque(store, PAGE_BYTES).delete(make_keys(40)[:5])
    found = run_json("inspect", "--store", tmp_path / "s", "--keys", 100)
    assert found["store"]["pages"] == found["namespaces"][0]["pages"] == len(found["hottest"]) == 35


def test_tables_show_the_same_to_people(tmp_path: Path) -> None:
    shown = run("inspect", "--store", filled_store(tmp_path / "[red]s"), "--segments", "--keys", 2).stdout
    assert str(segments(tmp_path / "[red]s")[0]) in shown
    assert "sealed" in shown
    assert "model" in shown
    assert "10 of 15" in shown


def test_a_store_that_others_use_is_shown_and_stays_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start_python(
        """
        with small_store(Path(sys.argv[1])) as store:
            save(opaque(store, 65536), make_keys(20), 65536)
            print("ready", flush=True)
            sys.stdin.readline()
            assert check(opaque(store, 65536), make_keys(20), 65536).all_ok
        """,
        tmp_path / "s",
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        # A capacity of the user's environment is for stores that serve: a look at one must not change or refuse it.
        monkeypatch.setenv("GDSSTORE_CAPACITY", "128MiB")
        assert run_json("inspect", "--store", tmp_path / "s")["store"]["pages"] == 20
        stats = run_json("stats", "--store", tmp_path / "s")
        assert stats["state"] == {
            "clean": False,
            "this_boot": True,
            "capacity_bytes": 64 << 20,
            "in_use": True,
        }
        assert run_json("verify", "--store", tmp_path / "s")["pages_checked"] == 20
    finally:
        other.communicate("\n", timeout=60)
    assert other.returncode == 0


def test_stats_tell_how_the_store_was_closed(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    found = run_json("stats", "--store", tmp_path / "s")
    assert found["state"]["clean"] is True
    assert found["opened"] == "it was closed cleanly"
    assert found["catalog"]["pages"] == 40
    assert found["segments"]["sealed"] == 2
    (tmp_path / "s" / "state.json").unlink()
    assert run_json("stats", "--store", tmp_path / "s")["state"]["clean"] is False


def test_looking_changes_no_page(tmp_path: Path) -> None:
    filled_store(tmp_path / "s")
    for command in ("inspect", "stats", "verify"):
        run_json(command, "--store", tmp_path / "s")
    with small_store(tmp_path / "s") as store:
        assert check(opaque(store, PAGE_BYTES), make_keys(40), PAGE_BYTES).all_ok

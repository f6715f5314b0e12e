"""`gdsstore format` makes a store of full size, and touches nothing that is there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gdsstore.errors import VolumeError
from gdsstore.volume.format import Superblock
from gdsstore.volume.volume import Volume
from tests.cli.command import PAGE_BYTES, filled_store, run, run_json
from tests.store.helpers import check, make_keys, opaque, physical_bytes, segments, small_store

SMALL = ["--capacity", "32MiB", "--segment-bytes", "1MiB"]


def test_a_new_store_gets_all_its_segments_within_its_capacity(tmp_path: Path) -> None:
    found = run_json("format", "--store", tmp_path / "s", *SMALL)
    assert found["made"] is True
    assert found["segments"] == found["segments_wanted"] == len(segments(tmp_path / "s")) > 10
    assert found["bytes_written"] == found["segments"] << 20
    assert physical_bytes(tmp_path / "s") <= 32 << 20


def test_a_second_format_writes_nothing(tmp_path: Path) -> None:
    first = run_json("format", "--store", tmp_path / "s", *SMALL)
    again = run_json("format", "--store", tmp_path / "s")
    assert (again["made"], again["segments_written"]) == (False, 0)
    assert (again["segments"], again["capacity_bytes"]) == (first["segments"], 32 << 20)


def test_pages_of_a_store_that_is_formatted_again_stay(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s")
    assert run_json("format", "--store", store, "--capacity", "40MiB")["segments_written"] > 0
    with small_store(store, capacity=None) as opened:
        assert check(opaque(opened, PAGE_BYTES), make_keys(40), PAGE_BYTES).all_ok
        assert opened.capacity_bytes == 40 << 20


def test_several_volumes_share_the_segments(tmp_path: Path) -> None:
    found = run_json("format", "--store", tmp_path / "a", "--store", tmp_path / "b", *SMALL)
    assert found["volumes"] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert found["segments"] == len(segments(tmp_path / "a")) + len(segments(tmp_path / "b"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs a --capacity"),
        (["--capacity", "many"], "capacity"),
        (["--capacity", "4MiB", "--segment-bytes", "4MiB"], "capacity must hold"),
        (["--capacity", "32MiB", "--segment-bytes", "3MiB"], "segment_bytes"),
    ],
)
def test_a_store_that_cannot_be_made_leaves_nothing(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = run("format", "--store", tmp_path / "s", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert not (tmp_path / "s" / "store.json").exists()


def test_another_segment_size_is_refused_for_a_store_that_is_there(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "s", 1)
    result = run("format", "--store", store, "--segment-bytes", "2MiB")
    assert result.exit_code == 2
    assert "segments of 1MiB, which stay" in result.stderr


def test_a_drive_without_room_for_all_segments_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Volume, superblock: Superblock, progress: object = None) -> None:
        if superblock.segment_id >= 3:
            raise VolumeError("cannot make a segment: no space left on device", errno=errno.ENOSPC)
        create(self, superblock)

    create = Volume.create_segment
    monkeypatch.setattr(Volume, "create_segment", full)
    found = run_json("format", "--store", tmp_path / "s", *SMALL, exit_code=1)
    assert found["segments"] == 3 < found["segments_wanted"]

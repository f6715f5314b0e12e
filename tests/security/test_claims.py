"""A file that claims a lot gets nothing: no memory, no disk, no number beyond what the store has room for.

Each of these was found by a fuzzer of tests/fuzz, or by reading beside it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gdsstore import Config, ConfigError, StoreDamagedError
from gdsstore.catalog.heat import Heat
from gdsstore.catalog.records import SegmentState
from gdsstore.catalog.recovery import scan_segment
from gdsstore.catalog.state import State, read_state
from gdsstore.directory import StoreDirectory
from gdsstore.volume.format import FORMAT_VERSION, MAX_SEGMENTS, Geometry, Superblock
from gdsstore.volume.volume import Volume
from tests.fuzz.harness import little_memory
from tests.security.stores import KEYS, PAGE_BYTES, fill, filled
from tests.store.helpers import check, forget_catalog, opaque, segments, small_store

MiB = 1 << 20
UUID = b"u" * 16
DEEP = b"[" * 100_000


@pytest.mark.parametrize("segment_bytes", [2 * MiB, 1 << 38, 1 << 43])
def test_a_superblock_of_another_segment_size_is_not_believed(tmp_path: Path, segment_bytes: int) -> None:
    """It would have a table of terabytes read, and slots used that the heat file has no stamps for."""
    volume = Volume(0, tmp_path)
    volume.prepare()
    path = volume.segment_path(3)
    path.write_bytes(Superblock(UUID, 3, 7, Geometry.of(segment_bytes, 1 << 16)).encode())
    os.truncate(path, segment_bytes)
    with little_memory():
        found = scan_segment(volume, 3, UUID, MiB)
    assert found.row.state is SegmentState.LOST
    assert "bytes a segment" in found.problem


def test_a_store_goes_on_beside_a_segment_that_claims_to_be_larger(tmp_path: Path) -> None:
    root = tmp_path / "s"
    filled(root)
    forget_catalog(root)
    path = segments(root)[0]
    old = Superblock.decode(path.read_bytes()[:4096], str(path))
    larger = Geometry.of(1 << 30, old.geometry.slot_bytes)
    with path.open("r+b") as file:
        file.write(Superblock(old.store_uuid, old.segment_id, old.generation, larger).encode())
        file.truncate(1 << 30)
    with little_memory(), small_store(root) as store:
        assert not check(opaque(store, PAGE_BYTES), KEYS, PAGE_BYTES).all_ok
        assert store.opened.recovered is not None
        assert store.opened.recovered.left_out == [old.segment_id]
        fill(store)
        assert check(opaque(store, PAGE_BYTES), KEYS, PAGE_BYTES).all_ok


def test_a_heat_file_that_is_larger_than_any_is_not_given_blocks(tmp_path: Path) -> None:
    path = tmp_path / "heat"
    Heat(path, MiB).close()
    most_bytes = path.stat().st_size + 4 * (MiB // 4096) * MAX_SEGMENTS
    os.truncate(path, most_bytes + 1)  # no more than that: where this fails, it takes as much of the drive
    heat = Heat(path, MiB)
    assert heat.used_bytes < 4 * MiB
    assert path.stat().st_size < 4 * MiB
    heat.close()


@pytest.mark.parametrize(
    "content", [DEEP, b'{"a":' * 50_000, b'"' + b"a" * (2 * MiB) + b'"'], ids=["[", "{", "long"]
)
def test_brackets_without_end_are_damage_and_no_crash(tmp_path: Path, content: bytes) -> None:
    root = tmp_path / "s"
    filled(root)
    for file in (root / "state.json", *(root / "namespaces").iterdir()):
        file.write_bytes(content)
    with small_store(root) as store:
        assert check(opaque(store, PAGE_BYTES), KEYS, PAGE_BYTES).all_ok
    (root / "store.json").write_bytes(content)
    with pytest.raises(StoreDamagedError):
        small_store(root)


@pytest.mark.parametrize("version", [1e999, 1.0, True, "1", None, []])
def test_a_version_is_a_whole_number(tmp_path: Path, version: Any) -> None:
    root = tmp_path / "s"
    filled(root)
    content = json.loads((root / "store.json").read_text())
    assert content["format_version"] == FORMAT_VERSION
    (root / "store.json").write_text(json.dumps({**content, "format_version": version}))
    with pytest.raises(StoreDamagedError):
        small_store(root)


@pytest.mark.parametrize("capacity", [-1, 1 << 63, 1 << 200])
def test_a_capacity_that_no_drive_has_is_not_believed(tmp_path: Path, capacity: int) -> None:
    state = {"boot_id": "b", "clean": True, "capacity_bytes": capacity, "catalog_mark": ""}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_state(tmp_path / "state.json") == State()


@pytest.mark.parametrize("mark", [-1, 1 << 62, 1 << 70, True, 1.0])
def test_a_clear_in_the_far_future_does_not_use_up_the_sequence(tmp_path: Path, mark: Any) -> None:
    root = tmp_path / "s"
    filled(root)
    for file in (root / "namespaces").iterdir():
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "cleared_before": mark}))
    assert StoreDirectory(root).cleared() == {}
    with small_store(root) as store:
        fill(store)
        assert check(opaque(store, PAGE_BYTES), KEYS, PAGE_BYTES).all_ok


def test_a_namespace_s_file_that_describes_another_one_is_set_right_and_stays_cleared(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with small_store(root) as store:
        pages = opaque(store, PAGE_BYTES)
        pages.clear()
        (file,) = (root / "namespaces").iterdir()
    mark = json.loads(file.read_text())["cleared_before"]
    assert mark > 0
    file.write_text(json.dumps({"describes": {"model": "another"}, "cleared_before": mark}))
    with small_store(root) as store:
        pages = opaque(store, PAGE_BYTES)
        assert store.directory.namespaces() == {pages.digest: pages.namespace.describe()}
        assert store.directory.cleared() == {pages.digest: mark}


def test_a_config_file_of_brackets_without_end_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"capacity = " + DEEP)
    with pytest.raises(ConfigError, match="not TOML"):
        Config.load(path, {})

"""Names that come from files and messages lead to no file outside of the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gdsstore
from gdsstore import ArgumentError, StoreDamagedError
from gdsstore.directory import StoreDirectory
from gdsstore.engines import measured
from gdsstore.volume.volume import Volume
from tests.security.stores import filled
from tests.store.helpers import small_store

HOSTILE = ["../elsewhere", "/elsewhere", "a/../../elsewhere", ".", "..", "", "x\0y", "a\nb", "%2e%2e"]


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "volumes",
    [
        ["{elsewhere}"],  # the first is where store.json is
        [".", "../elsewhere"],
        [".", "elsewhere"],
        [".", ""],
        [".", "x\0y"],
        [".", "."],
        [".", "/a", "/a"],
        [".", 5],
        "..",
        {".": 1},
    ],
    ids=repr,
)
def test_store_json_names_its_own_directory_and_whole_paths(tmp_path: Path, volumes: Any) -> None:
    root = tmp_path / "s"
    filled(root)
    if isinstance(volumes, list):
        volumes = [str(each).format(elsewhere=tmp_path / "elsewhere") if each != 5 else 5 for each in volumes]
    rewrite(root / "store.json", volumes=volumes)
    with pytest.raises(StoreDamagedError, match=r"store\.json"):
        small_store(root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_a_volume_without_this_store_s_mark_is_not_written_to(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    filled(root)
    elsewhere.mkdir()
    rewrite(root / "store.json", volumes=[".", str(elsewhere)])
    with pytest.raises(gdsstore.StoreError, match="drive mounted"):
        small_store(root)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "segment_bytes", [0, -1, 1, 4096, (1 << 20) + 4096, 3 << 20, 1 << 50, 2.5, "1MiB", True]
)
def test_store_json_with_a_segment_size_that_no_store_has_is_damaged(
    tmp_path: Path, segment_bytes: Any
) -> None:
    root = tmp_path / "s"
    filled(root)
    rewrite(root / "store.json", segment_bytes=segment_bytes)
    with pytest.raises(StoreDamagedError, match=r"store\.json is damaged"):
        small_store(root)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_namespace_says_of_itself_names_no_file(tmp_path: Path, name: str) -> None:
    root = tmp_path / "s"
    with small_store(root) as store:
        layout = gdsstore.PageLayout.opaque(4096)
        namespace = store.namespace(model=name or "m", pool=name or "p", extra=((name, name),), layout=layout)
        namespace.clear()
        (file,) = (root / "namespaces").iterdir()
        assert file.name == f"{namespace.digest.hex()}.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_device_s_name_names_no_file(tmp_path: Path, name: str) -> None:
    assert measured.file_of(tmp_path, name, 0).parent == tmp_path
    assert len(measured.file_of(tmp_path, name, 0).name) == len("paths-.json") + 16


@pytest.mark.parametrize(
    "name", ["0000000a.seg", "..seg", "00000001.seg.bak", "\u0661" * 8 + ".seg", "99999999.seg"]
)
def test_only_files_that_are_named_like_segments_are_segments(tmp_path: Path, name: str) -> None:
    volume = Volume(0, tmp_path)
    volume.prepare()
    (volume.directory / name).write_bytes(b"x")
    assert volume.segment_ids() == {}


@pytest.mark.parametrize("stem", ["ab cd", "AB" * 16, "ab" * 15, "ab" * 17, "zz" * 16, "ab" * 16 + " "])
def test_only_files_that_are_named_like_a_digest_describe_a_namespace(tmp_path: Path, stem: str) -> None:
    directory = StoreDirectory(tmp_path)
    directory.prepare()
    content = {"describes": {}, "cleared_before": 1 << 40}
    (tmp_path / "namespaces" / f"{stem}.json").write_text(json.dumps(content))
    assert directory.cleared() == {}


def test_a_path_with_a_nul_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match="path"):
        gdsstore.open("/tmp/a\0b")

"""A page that was synced is lost all the same if the name of its file, or of a directory above it, did not reach the drive."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gdsstore.directory import StoreDirectory
from gdsstore.errors import VolumeError
from gdsstore.volume.format import Geometry, Superblock
from gdsstore.volume.volume import Volume

SEGMENT_BYTES = 1 << 20


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, frozenset[str]]]:
    """Directories in the order in which they were synced, with the names that were in them then."""
    seen: list[tuple[Path, frozenset[str]]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            seen.append((path, frozenset(os.listdir(path))))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_a_new_segment_has_its_name_on_the_drive(
    tmp_path: Path, synced: list[tuple[Path, frozenset[str]]]
) -> None:
    volume = Volume(0, tmp_path)
    volume.prepare()
    synced.clear()
    volume.create_segment(Superblock(bytes(16), 7, 1, Geometry.of(SEGMENT_BYTES, 65536)))
    assert (tmp_path / "segments", frozenset({"00000007.seg"})) in synced


@pytest.mark.parametrize(
    "make", [lambda path: Volume(0, path).prepare(), lambda path: StoreDirectory(path).prepare()]
)
def test_new_directories_have_their_names_on_the_drive(
    tmp_path: Path, synced: list[tuple[Path, frozenset[str]]], make: object
) -> None:
    path = tmp_path / "a" / "b"
    assert callable(make)
    make(path)
    names = dict(synced)
    assert "a" in names[tmp_path]
    assert "b" in names[tmp_path / "a"]
    assert names[path] == set(os.listdir(path))


def test_directories_that_are_there_are_not_synced_again(
    tmp_path: Path, synced: list[tuple[Path, frozenset[str]]]
) -> None:
    Volume(0, tmp_path).prepare()
    synced.clear()
    Volume(0, tmp_path).prepare()
    assert synced == []


def test_a_segment_whose_name_does_not_reach_the_drive_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume(0, tmp_path)
    volume.prepare()

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(VolumeError):
        volume.create_segment(Superblock(bytes(16), 7, 1, Geometry.of(SEGMENT_BYTES, 65536)))
    assert os.listdir(volume.directory) == []

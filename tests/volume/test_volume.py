"""Segment files: made whole or not at all, never through a link, and only ours are taken for ours."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.errors import VolumeError
from gdsstore.volume import direct as direct_module
from gdsstore.volume import volume as volume_module
from gdsstore.volume.direct import probe_direct
from gdsstore.volume.format import (
    ENTRY,
    FLAG_DELETED,
    FLAG_STORED,
    Geometry,
    Superblock,
    entry_salt,
    intact,
    seal_entries,
)
from gdsstore.volume.tombstones import bury
from gdsstore.volume.volume import Volume, read_entries, write_entries

SEGMENT_BYTES = 1 << 20
UUID = b"u" * 16
GEOMETRY = Geometry.of(SEGMENT_BYTES, 8192)


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    made = Volume(0, tmp_path / "v")
    made.prepare()
    return made


def superblock(segment_id: int = 3, uuid: bytes = UUID) -> Superblock:
    return Superblock(uuid, segment_id, 7, GEOMETRY)


def test_a_new_segment_is_fully_written_and_private(volume: Volume) -> None:
    steps: list[int] = []
    volume.create_segment(superblock(), steps.append)
    info = volume.segment_path(3).stat()
    assert info.st_size == SEGMENT_BYTES == sum(steps)
    assert info.st_blocks * 512 >= SEGMENT_BYTES  # no holes
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert stat.S_IMODE(volume.directory.stat().st_mode) == 0o700
    assert volume.read_superblock(3) == superblock()
    assert volume.segment_ids() == {3: info.st_blocks * 512}
    with volume.table(3) as fd:
        assert not intact(read_entries(fd, GEOMETRY), entry_salt(UUID)).any()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_segment_that_could_not_be_written_leaves_nothing_behind(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert volume.direct  # probed before the drive fails

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(volume_module.os, "pwrite", fail)
    with pytest.raises(VolumeError) as caught:
        volume.create_segment(superblock())
    assert caught.value.context["errno"] == code
    assert list(volume.directory.iterdir()) == []


def test_a_short_write_counts_as_a_full_drive(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    assert volume.direct
    monkeypatch.setattr(volume_module.os, "pwrite", lambda fd, data, offset: len(data) // 2)
    with pytest.raises(VolumeError) as caught:
        volume.create_segment(superblock())
    assert caught.value.context["errno"] == errno.ENOSPC
    assert list(volume.directory.iterdir()) == []


def test_half_written_segments_of_dead_makers_are_removed_and_those_of_live_ones_stay(volume: Volume) -> None:
    dead, alive = volume.directory / "00000001.partial", volume.directory / "00000002.partial"
    dead.write_bytes(b"half")
    alive.write_bytes(b"half")
    with alive.open("rb") as maker:
        fcntl.flock(maker, fcntl.LOCK_EX)
        volume.remove_partial()
    assert not dead.exists()
    assert alive.exists()
    assert volume.segment_ids() == {}


def test_a_link_in_place_of_a_segment_is_not_followed(volume: Volume, tmp_path: Path) -> None:
    volume.create_segment(superblock())
    target = tmp_path / "elsewhere"
    volume.segment_path(3).rename(target)
    volume.segment_path(3).symlink_to(target)
    before = target.read_bytes()
    assert volume.segment_ids() == {}
    with pytest.raises(VolumeError, match="symbolic"):
        volume.read_superblock(3)
    for opening in (volume.open_data, volume.open_table):
        with pytest.raises(OSError, match="symbolic") as caught:
            opening(3)
        assert caught.value.errno == errno.ELOOP
    assert target.read_bytes() == before


def test_a_link_in_place_of_a_half_written_segment_is_not_followed(volume: Volume, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"precious")
    volume.segment_path(3).with_suffix(".partial").symlink_to(target)
    with pytest.raises(VolumeError):
        volume.create_segment(superblock())
    assert target.read_bytes() == b"precious"


def test_files_that_no_store_named_are_left_alone(volume: Volume) -> None:
    strangers = [
        "5.seg",
        "-0000001.seg",
        "99999999999999.seg",
        "00999999.seg",
        "0000_001.seg",
        "٣٣٣٣٣٣٣٣.seg",
        ".seg",
        "a.seg",
        "00000001.seg.bak",
    ]
    for name in strangers:
        (volume.directory / name).write_bytes(b"x")
    (volume.directory / "00000007.seg").mkdir()
    volume.create_segment(superblock())
    assert set(volume.segment_ids()) == {3}


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: p.unlink(), "No such file"),
    "empty": (lambda p: os.truncate(p, 0), "not a segment"),
    "cut inside the superblock": (lambda p: os.truncate(p, 1000), "not a segment"),
    "cut inside the table": (lambda p: os.truncate(p, 5000), "cut short"),
    "one byte short": (lambda p: os.truncate(p, SEGMENT_BYTES - 1), "cut short"),
    "overwritten": (lambda p: p.write_bytes(b"#!/bin/sh\n" * 200_000), "not a segment"),
    "another segment": (
        lambda p: p.write_bytes(superblock(4).encode().ljust(SEGMENT_BYTES, b"\0")),
        "holds segment 4",
    ),
    "a directory": (lambda p: (p.unlink(), p.mkdir()), "directory"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_segment_is_told_and_named(kind: str, volume: Volume) -> None:
    volume.create_segment(superblock())
    damage, message = DAMAGE[kind]
    damage(volume.segment_path(3))
    with pytest.raises(VolumeError, match=message) as caught:
        volume.read_superblock(3)
    assert caught.value.context["path"] == str(volume.segment_path(3))


def entries_of(slots: list[int]) -> np.ndarray:
    entries = np.zeros(len(slots), ENTRY)
    entries["slot"], entries["generation"], entries["flags"] = slots, 7, FLAG_STORED
    entries["sequence"] = 1000
    return seal_entries(entries, entry_salt(UUID))


def test_burying_flags_these_entries_and_no_others(volume: Volume) -> None:
    volume.create_segment(superblock())
    with volume.table(3) as fd:
        write_entries(fd, 0, entries_of(list(range(10))))
    bury(volume, 3, GEOMETRY, 7, np.array([7, 2, 3, 99, 100_000], np.uint32), UUID, 5000)
    with volume.table(3) as fd:
        table = read_entries(fd, GEOMETRY, 0, 10)
    assert intact(table, entry_salt(UUID)).all()
    assert np.flatnonzero(table["flags"] & FLAG_DELETED).tolist() == [2, 3, 7]
    assert table["sequence"].tolist() == [5000 if slot in (2, 3, 7) else 1000 for slot in range(10)]


def test_burying_touches_nothing_of_another_generation_or_store(volume: Volume) -> None:
    volume.create_segment(superblock())
    with volume.table(3) as fd:
        write_entries(fd, 0, entries_of([0, 1]))
    before = volume.segment_path(3).read_bytes()
    bury(volume, 3, GEOMETRY, 8, np.array([0, 1], np.uint32), UUID, 5000)
    bury(volume, 3, GEOMETRY, 7, np.array([0, 1], np.uint32), b"x" * 16, 5000)
    bury(volume, 3, GEOMETRY, 7, np.array([5], np.uint32), UUID, 5000)
    assert volume.segment_path(3).read_bytes() == before


def test_a_tombstone_is_never_older_than_what_it_buries(volume: Volume) -> None:
    """The clock may have gone back: an older copy elsewhere would else come back in a rebuild."""
    volume.create_segment(superblock())
    with volume.table(3) as fd:
        write_entries(fd, 0, entries_of([0]))
    bury(volume, 3, GEOMETRY, 7, np.array([0], np.uint32), UUID, 10)
    with volume.table(3) as fd:
        assert read_entries(fd, GEOMETRY, 0, 1)["sequence"].tolist() == [1000]


def test_direct_io_is_probed_and_latched(volume: Volume) -> None:
    found = volume.direct
    assert found.direct
    assert found.memory_alignment in direct_module.MEMORY_ALIGNMENTS
    assert volume.direct is found
    assert list(volume.directory.iterdir()) == []


@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_a_filesystem_without_direct_io_is_used_through_the_page_cache_and_says_so(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused_at: str
) -> None:
    real = os.open

    def refuse_open(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    def refuse_write(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    if refused_at == "open":
        monkeypatch.setattr(os, "open", refuse_open)
    else:
        monkeypatch.setattr(os, "pwrite", refuse_write)
    found = probe_direct(volume.directory)
    monkeypatch.undo()
    assert not found.direct
    assert found.memory_alignment == 1
    assert "does not do O_DIRECT" in caplog.text
    assert str(volume.directory) in caplog.text
    assert list(volume.directory.iterdir()) == []


def test_a_probe_that_fails_for_other_reasons_is_an_error(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(VolumeError) as caught:
        probe_direct(volume.directory)
    assert caught.value.context["errno"] == errno.ENOSPC
    monkeypatch.undo()
    assert list(volume.directory.iterdir()) == []

"""Directories that are no place for a store, and filesystems that do less than ext4."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gdsstore import ArgumentError, GdsStoreError, StoreError, VolumeError
from tests.store.helpers import (
    check,
    forget_catalog,
    logged,
    make_keys,
    opaque,
    python,
    save,
    small_store,
    succeeded,
)
from tests.store.mounts import mounted, overlay, small_ext4, small_tmpfs

KEYS = make_keys(200)


def works(path: Path) -> None:
    for turn in range(3):
        if turn == 2:
            forget_catalog(path)
        with small_store(path, capacity="40MiB") as store:
            for nbytes in (8192, 5000):
                assert save(opaque(store, nbytes), KEYS, nbytes).all_ok
                assert check(opaque(store, nbytes), KEYS, nbytes).all_ok
            assert store.upkeep.turn() is None


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    with pytest.raises(ArgumentError, match="is a file"):
        small_store(file)
    with pytest.raises(StoreError, match="Not a directory"):
        small_store(file / "below")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(GdsStoreError):
        small_store(tmp_path / "link")
    assert file.read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_path_with_a_file_where_the_store_needs_a_directory_is_refused(tmp_path: Path) -> None:
    for name in ("catalog", "namespaces", "segments"):
        root = tmp_path / f"with-{name}"
        root.mkdir()
        (root / name).write_bytes(b"precious")
        with pytest.raises(GdsStoreError, match=name):
            small_store(root)
        assert (root / name).read_bytes() == b"precious"


@pytest.mark.parametrize("path", ["/proc/gdsstore-test", "/sys/gdsstore-test", "/proc/self"])
def test_a_directory_where_nothing_can_be_made_is_refused(path: str) -> None:
    """The tests may run as root, who may write everywhere but there."""
    with pytest.raises(GdsStoreError, match="cannot"):
        small_store(path)


@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["not writable", "not even searchable"])
def test_a_directory_without_permission_is_refused(tmp_path: Path, mode: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    program = """
    from gdsstore import GdsStoreError
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    try:
        small_store(sys.argv[1])
    except GdsStoreError as error:
        print(type(error).__name__, error)
    """
    with tempfile.TemporaryDirectory() as directory:  # below one that everybody may search
        Path(directory).chmod(mode)
        said = succeeded(python(program, Path(directory) / "s"))
    assert said.startswith("StoreError")
    assert "Permission denied" in said


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="too long"):
        small_store(tmp_path / ("x" * 300))


def test_a_filesystem_mounted_read_only_is_refused_and_its_store_unharmed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    works(source / "s")
    with mounted(tmp_path / "target", "--bind", str(source)) as target:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)
        for path in (target / "s", target / "new"):
            with pytest.raises(GdsStoreError, match="Read-only"):
                small_store(path)
    works(source / "s")


def test_a_store_in_shared_memory_works(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 100) as directory:
        works(directory / "s")


def test_a_store_on_overlayfs_works(tmp_path: Path) -> None:
    with overlay(tmp_path) as directory:
        works(directory / "s")


def test_a_store_on_ext4_works(tmp_path: Path) -> None:
    with small_ext4(tmp_path, 100) as directory:
        works(directory / "s")


def test_volumes_of_which_one_does_no_direct_io_work_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def no_direct(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT and "/plain/" in str(path):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(os, "open", no_direct)
        with small_store([tmp_path / "direct", tmp_path / "plain"]) as store:
            for turn in range(6):
                assert save(opaque(store), make_keys(100, turn)).all_ok
            assert all(check(opaque(store), make_keys(100, turn)).all_ok for turn in range(6))
            assert [volume.direct.direct for volume in store.volumes] == [True, False]
    finally:
        patch.undo()
    assert "does not do O_DIRECT" in logged(caplog.records)


def test_a_probe_that_is_refused_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store(tmp_path / "s", engine="auto") as store:
        monkeypatch.setattr(os, "pwrite", _io_error)
        with pytest.raises(VolumeError, match="cannot write into the volume"):
            save(opaque(store), KEYS)
        monkeypatch.undo()
        assert save(opaque(store), KEYS).all_ok


def _io_error(*_: Any) -> int:
    raise OSError(5, "Input/output error")

"""Nothing of a store is reached through a symbolic link: what the link points to stays as it is, whatever it is called."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from gdsstore import GdsStoreError
from gdsstore.engines import measured
from gdsstore.engines.paths import Path as IoPath
from gdsstore.volume.volume import Volume
from tests.security.stores import KEYS, PAGE_BYTES, fill, filled
from tests.store.helpers import check, opaque, segments, small_store

FILES = ["store.json", "state.json", "heat", "open.lock", "users.lock", "maintainer.lock", "catalog/data.mdb"]
FILES += ["catalog/lock.mdb", "segments/00000000.seg"]


def use(*roots: Path) -> None:
    """Open a store, and do what can be done with it; whatever is refused is refused with a typed error."""
    with contextlib.suppress(GdsStoreError), small_store(list(roots)) as store:
        pages = opaque(store, PAGE_BYTES)
        check(pages, KEYS, PAGE_BYTES)
        fill(store)
        pages.delete(KEYS[:3])


def planted(path: Path, elsewhere: Path) -> bytes:
    """Move a file away and leave a link to it in its place; returns its content."""
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    os.utime(elsewhere, ns=(1, 1))
    return elsewhere.read_bytes()


@pytest.mark.parametrize("closed", ["cleanly", "not cleanly"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path, name: str, closed: str) -> None:
    root = tmp_path / "s"
    filled(root)
    if closed == "not cleanly":
        state = root / "state.json"
        state.write_text(state.read_text().replace('"clean": true', '"clean": false'))
    content = planted(root / name, tmp_path / "elsewhere")
    use(root)
    assert (tmp_path / "elsewhere").read_bytes() == content
    assert (tmp_path / "elsewhere").stat().st_mtime_ns == 1


@pytest.mark.parametrize("name", ["segments", "catalog", "namespaces"])
def test_a_link_in_place_of_a_directory_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "s"
    filled(root)
    (root / name).rename(tmp_path / "elsewhere")
    (root / name).symlink_to(tmp_path / "elsewhere")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").iterdir()}
    with pytest.raises(GdsStoreError, match="symbolic link"):
        small_store(root)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").iterdir()} == before


def test_a_link_to_the_store_s_directory_is_the_operator_s_choice(tmp_path: Path) -> None:
    filled(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with small_store(tmp_path / "link") as store:
        assert check(opaque(store, PAGE_BYTES), KEYS, PAGE_BYTES).all_ok


def test_a_link_in_place_of_a_volume_s_mark_is_not_followed(tmp_path: Path) -> None:
    roots = tmp_path / "a", tmp_path / "b"
    filled(list(roots))
    planted(roots[1] / "volume.json", tmp_path / "elsewhere")
    with pytest.raises(GdsStoreError, match="drive mounted"):
        small_store(list(roots))


def test_a_link_in_place_of_a_namespace_s_file_is_replaced(tmp_path: Path) -> None:
    root = tmp_path / "s"
    filled(root)
    for number, file in enumerate(sorted((root / "namespaces").iterdir())):
        planted(file, tmp_path / f"elsewhere{number}")
    use(root)
    assert all((tmp_path / f"elsewhere{number}").stat().st_mtime_ns == 1 for number in range(2))
    assert not any(file.is_symlink() for file in (root / "namespaces").iterdir())


def test_a_link_in_place_of_a_measurement_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "s"
    filled(root)
    planted(measured.file_of(root, "gpu", 0), tmp_path / "elsewhere")
    assert measured.load(root, "gpu", 0, {}, (IoPath.BOUNCE,)).measurements is None


def test_links_to_everything_in_segments_are_no_segments(tmp_path: Path) -> None:
    root = tmp_path / "s"
    filled(root)
    for path in segments(root):
        planted(path, tmp_path / path.name)
    use(root)
    assert all((tmp_path / path.name).stat().st_mtime_ns == 1 for path in segments(root) if path.is_symlink())


@pytest.mark.timeout(30)
def test_a_pipe_that_is_named_like_a_half_written_segment_hangs_nothing(tmp_path: Path) -> None:
    volume = Volume(0, tmp_path / "s")
    volume.prepare()
    pipe = volume.directory / "00000007.partial"
    os.mkfifo(pipe)
    began = time.monotonic()
    volume.remove_partial()
    assert time.monotonic() - began < 10


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [*FILES, "namespaces/" + "ab" * 16 + ".json"])
def test_a_pipe_in_place_of_a_file_hangs_nothing(tmp_path: Path, name: str) -> None:
    root = tmp_path / "s"
    filled(root)
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    use(root)

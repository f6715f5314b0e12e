"""Directories are 0700 and files 0600, whatever the umask and whatever the store has just done."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsstore.store import Store
from tests.security.stores import fill
from tests.store.helpers import forget_catalog, small_store

UMASKS = [0o000, 0o022, 0o077]


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def loose(*roots: Path) -> dict[str, str]:
    """What others than the owner could use, or what the owner could not."""
    found = {}
    for root in roots:
        for path in (root, *root.rglob("*")):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode != (0o700 if path.is_dir() else 0o600):
                found[str(path)] = oct(mode)
    return found


def at_work(store: Store) -> None:
    fill(store)
    store.sync()
    store.stats()


def test_everything_that_a_store_makes_is_its_owner_s_alone(tmp_path: Path, umask: int) -> None:
    volumes = [tmp_path / "a" / "new" / "one", tmp_path / "b" / "two"]
    with small_store(volumes) as store:
        at_work(store)
        assert len(list(volumes[0].rglob("*"))) > 12
        assert loose(tmp_path / "a", tmp_path / "b") == {}
    assert loose(tmp_path / "a", tmp_path / "b") == {}


def test_what_is_made_again_after_damage_is_the_owner_s_alone(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "s"
    with small_store(path) as store:
        at_work(store)
    forget_catalog(path)
    for file in (path / "heat", path / "state.json", *(path / "namespaces").iterdir()):
        file.write_bytes(b"damaged")
    with small_store(path) as store:
        at_work(store)
    assert loose(path) == {}


def test_a_directory_that_was_there_keeps_its_mode_and_what_is_in_it_is_closed(
    tmp_path: Path, umask: int
) -> None:
    path = tmp_path / "s"
    path.mkdir()
    path.chmod(0o755)
    with small_store(path) as store:
        at_work(store)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert set(loose(path)) == {str(path)}

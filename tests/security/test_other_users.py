"""Another user of the host can neither list nor read nor change anything of a store, though its directory is open to all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsstore import StoreError, VolumeError
from tests.security.stores import KEYS, PAGE_BYTES, fill, filled
from tests.store.helpers import check, opaque, small_store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

INTRUDER = """
import json, os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
got = []
def attempt(what, path, call):
    try:
        call()
    except OSError:
        return
    got.append(f"{what} {path}")
for path in sys.argv[1:]:
    attempt("list", path, lambda: os.listdir(path))
    for flags, what in ((os.O_RDONLY, "read"), (os.O_WRONLY, "write")):
        attempt(what, path, lambda: os.close(os.open(path, flags)))
    attempt("rename", path, lambda: os.rename(path, path + ".mine"))
    attempt("unlink", path, lambda: os.unlink(path))
    attempt("add", path, lambda: os.mkdir(path + "/mine"))
print(json.dumps(got))
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that everybody can enter, as the mount point of a drive is."""
    with tempfile.TemporaryDirectory(prefix="gdsstore-security-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def intrude(*paths: Path) -> list[str]:
    """What the user nobody managed to do to these paths."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", INTRUDER, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_intruder_can_do_what_he_is_let(shared: Path) -> None:
    (shared / "open").write_text("x")
    os.chmod(shared / "open", 0o644)
    assert intrude(shared / "open") == [f"read {shared / 'open'}"]


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_nobody_else_reads_lists_or_changes_a_store(shared: Path, mode: int) -> None:
    root = shared / "kv"
    root.mkdir(mode=mode)
    with small_store(root) as store:
        pages = fill(store)
        everything = [root, *root.rglob("*")]
        assert len(everything) > 10
        allowed = [] if mode == 0o700 else [f"list {root}", f"read {root}"]
        assert intrude(*everything) == allowed
        assert check(pages, KEYS, PAGE_BYTES).all_ok


@pytest.mark.parametrize("name", ["segments", "catalog", "namespaces"])
def test_a_directory_that_someone_else_put_there_is_refused(shared: Path, name: str) -> None:
    root = shared / "kv"
    root.mkdir()
    planted = root / name
    planted.mkdir()
    os.chown(planted, 65534, 65534)
    with pytest.raises((StoreError, VolumeError), match="another user"):
        small_store(root)
    assert list(planted.iterdir()) == []


def test_root_may_look_at_a_store_of_a_user(shared: Path) -> None:
    root = shared / "kv"
    filled(root)
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)
    with small_store(root) as store:
        assert check(opaque(store, PAGE_BYTES), KEYS, PAGE_BYTES).all_ok

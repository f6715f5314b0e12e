"""Fuzz: a whole store, some files of which hold something else when it is opened. No wrong byte, no error that is not typed."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.errors import GdsStoreError
    from gdsstore.transfer.results import PageStatus
    from gdsstore.volume.format import Superblock

from tests.fuzz.inputs import Choices, damaged_json  # noqa: E402
from tests.fuzz.segments import read_table, tamper  # noqa: E402
from tests.store.helpers import check, make_keys, opaque, save, small_store  # noqa: E402

PAGE_BYTES = 16384
KEYS, LATER = make_keys(40, "fuzz"), make_keys(5, "later")
JSON = ("store.json", "state.json", "namespaces")
SETTINGS = {
    "catalog_map_bytes": "8MiB",
    "capacity": "8MiB",
    "durability": "none",
    "workers": 1,
    "posix_threads": 1,
}


@cache
def template() -> Path:
    """A closed store of three segments, some of whose pages were deleted and some saved twice."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gdsstore-fuzz-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with small_store(directory / "s", **SETTINGS) as store:
        pages = opaque(store, PAGE_BYTES)
        assert save(pages, KEYS, PAGE_BYTES).all_ok
        pages.delete(KEYS[:4])
        assert save(pages, KEYS[2:6], PAGE_BYTES).all_ok
        opaque(store, PAGE_BYTES, pool="other").clear()
    return directory / "s"


def one_input(data: bytes) -> None:
    choices = Choices(data)
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gdsstore-fuzz-"))
    try:
        root = directory / "s"
        shutil.copytree(template(), root, symlinks=True)
        if choices.below(4):
            shutil.rmtree(root / "catalog")  # else its mark tells of the copy, and it is rebuilt as well
        for _ in range(1 + choices.below(3)):
            _damage(choices, root)
        for _ in range(2):
            _use(root)
    finally:
        shutil.rmtree(directory)


def _damage(choices: Choices, root: Path) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path = choices.one(files)
    kind = choices.below(8)
    if path.suffix == ".json" and kind < 6:
        path.write_bytes(damaged_json(choices, json.loads(template_of(path, root).read_bytes())))
    elif path.suffix == ".seg" and kind < 5:
        raw = path.read_bytes()
        superblock = Superblock.decode(template_of(path, root).read_bytes()[:4096], str(path))
        start = tamper(choices, superblock, read_table(raw, superblock.geometry))
        path.write_bytes(start + raw[len(start) :])
    elif kind == 6:
        os.truncate(path, choices.one((0, 1, 4095, 4096, 10_000, path.stat().st_size // 2)))
    elif kind == 7:
        path.unlink()
    else:
        _flip(choices, path)


def template_of(path: Path, root: Path) -> Path:
    return template() / path.relative_to(root)


def _flip(choices: Choices, path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(1 + choices.below(4)):
            file.seek(choices.below(max(size, 1)))
            file.write(choices.raw(1 + choices.below(3)))


def _use(root: Path) -> None:
    try:
        store = small_store(root, **SETTINGS)
    except GdsStoreError:
        return
    with store:
        pages = opaque(store, PAGE_BYTES)
        pages.lookup(KEYS)
        check(pages, KEYS, PAGE_BYTES)
        statuses = save(pages, LATER, PAGE_BYTES).status
        assert set(statuses.tolist()) <= SAVES, statuses
        check(pages, LATER, PAGE_BYTES)
        pages.delete(KEYS[10:12])
        assert not pages.contains(KEYS[10:12]).any()
        store.stats()


SAVES = {int(each) for each in PageStatus if each < 10 or each >= 20}

test_an_opened_store_serves_no_wrong_byte = quickly(one_input, 25)

if __name__ == "__main__":
    fuzz(one_input)

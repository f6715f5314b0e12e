"""Pages outlive the process, whatever became of it, and a store stays what it was made as."""

from __future__ import annotations

import gc
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import StoreBusyError, StoreDamagedError, StoreVersionError
from tests.store.helpers import (
    check,
    flip,
    forget_catalog,
    logged,
    make_keys,
    opaque,
    python,
    save,
    segments,
    small_store,
    start_python,
    succeeded,
)

PAGE = 8192
KEYS = make_keys(300)


def filled(path: Path, **settings: Any) -> Path:
    with small_store(path, **settings) as store:
        assert save(opaque(store), KEYS).all_ok
    return path


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    return filled(tmp_path / "s")


def test_pages_are_there_in_the_next_process(closed: Path) -> None:
    program = """
    with small_store(sys.argv[1]) as store:
        print(check(opaque(store), make_keys(300)).reasons(), store.opened.why)
    """
    for _ in range(2):
        assert succeeded(python(program, closed)) == "{'LOADED': 300} it was closed cleanly"


def test_pages_of_a_process_that_was_killed_are_there(tmp_path: Path) -> None:
    child = start_python(
        """
        store = small_store(sys.argv[1])
        assert save(opaque(store), make_keys(300)).all_ok
        print("saved", flush=True)
        sys.stdin.read()
        """,
        tmp_path / "s",
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "saved\n"
    child.kill()
    child.wait(30)
    with small_store(tmp_path / "s") as store:
        assert "checked" in store.opened.why
        assert check(opaque(store), KEYS).all_ok


def test_the_capacity_is_kept(closed: Path) -> None:
    with small_store(closed, capacity=None) as store:
        assert store.capacity_bytes == 64 << 20
    with small_store(closed, capacity="32MiB", segment_bytes="4MiB") as store:
        assert store.capacity_bytes == 32 << 20
        assert store.segment_bytes == 1 << 20  # fixed when the store was made
    with small_store(closed, capacity=None) as store:
        assert store.capacity_bytes == 32 << 20


def test_everything_is_private(closed: Path) -> None:
    for directory, names, files in os.walk(closed):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE((Path(directory) / name).stat().st_mode) == 0o600, name
        assert not [name for name in names if name.startswith(".")]


def test_a_rebuilt_catalog_says_what_the_old_one_said(tmp_path: Path) -> None:
    """Also after deletes, a clear, and several namespaces and page sizes."""
    path = tmp_path / "s"
    with small_store(path) as store:
        one, two, large = opaque(store), opaque(store, pool="two"), opaque(store, 50_000)
        assert all(save(bound, KEYS).all_ok for bound in (one, two))
        assert save(large, KEYS[:60], 50_000).all_ok
        assert one.delete(KEYS[::3]).all()
        assert save(one, KEYS[:30]).all_ok  # some anew
        assert two.clear() == 300
        assert save(two, KEYS[50:60]).all_ok
        before = [bound.contains(KEYS) for bound in (one, two, large)]
    forget_catalog(path)
    with small_store(path) as store:
        bounds = [opaque(store), opaque(store, pool="two"), opaque(store, 50_000)]
        assert [bound.contains(KEYS).tolist() for bound in bounds] == [there.tolist() for there in before]
        for bound, there in zip(bounds, before, strict=True):
            result = check(bound, KEYS, bound.namespace.layout.page_bytes)
            assert np.array_equal(result.ok, there)


def forget_lock(path: Path) -> None:
    (path / "catalog" / "lock.mdb").unlink()


def spoil(name: str, content: bytes | None) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content)

    return damage


def use_twice(path: Path) -> None:
    with small_store(path) as store:
        assert check(opaque(store), KEYS).all_ok
        assert save(opaque(store), make_keys(50, "more")).all_ok
    with small_store(path) as store:
        assert store.opened.why == "it was closed cleanly"
        assert check(opaque(store), make_keys(50, "more")).all_ok


LOSSES: dict[str, Callable[[Path], Any]] = {
    "data.mdb deleted": lambda p: (p / "catalog" / "data.mdb").unlink(),
    "lock.mdb deleted": forget_lock,
    "catalog directory deleted": lambda p: (forget_catalog(p), (p / "catalog").rmdir()),
    "data.mdb emptied": spoil("catalog/data.mdb", b""),
    "data.mdb of noise": spoil("catalog/data.mdb", os.urandom(1 << 20)),
    "lock.mdb of noise": spoil("catalog/lock.mdb", os.urandom(8192)),
    "data.mdb a link": lambda p: (
        (p / "catalog/data.mdb").rename(p / "x"),
        (p / "catalog/data.mdb").symlink_to(p / "x"),
    ),
    "one bit of data.mdb": lambda p: flip(p / "catalog" / "data.mdb", 8 * 4096 * 9 + 77),
    "state.json deleted": spoil("state.json", None),
    "state.json of noise": spoil("state.json", b"\xff{}"),
    "heat deleted": spoil("heat", None),
    "heat of noise": spoil("heat", os.urandom(5000)),
    "locks deleted": lambda p: [(p / name).unlink() for name in ("users.lock", "open.lock")],
    "namespaces deleted": lambda p: [file.unlink() for file in (p / "namespaces").iterdir()],
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_can_be_rebuilt_may_be_lost_or_damaged_while_the_store_is_closed(
    closed: Path, loss: str
) -> None:
    LOSSES[loss](closed)
    if "noise" in loss or "bit" in loss:  # a crash must not take the other tests along
        succeeded(
            python("from tests.store.test_reopen import use_twice; use_twice(Path(sys.argv[1]))", closed)
        )
    else:
        use_twice(closed)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"format_version": 1, "uuid": "00", "segment_bytes": 1048576, "volumes": ["."]}',
    ],
    ids=["empty", "half", "list", "no fields", "binary", "short uuid"],
)
def test_a_damaged_store_json_is_an_error_and_nothing_is_made_over_it(closed: Path, content: bytes) -> None:
    (closed / "store.json").write_bytes(content)
    before = {path.name: path.read_bytes() for path in segments(closed)}
    for capacity in (None, "64MiB"):
        with pytest.raises(StoreDamagedError, match=r"store\.json"):
            small_store(closed, capacity=capacity)
    assert (closed / "store.json").read_bytes() == content
    assert {path.name: path.read_bytes() for path in segments(closed)} == before


def test_a_store_json_that_came_back_brings_all_pages_back(closed: Path) -> None:
    content = (closed / "store.json").read_bytes()
    (closed / "store.json").write_bytes(b"")
    with pytest.raises(StoreDamagedError):
        small_store(closed)
    (closed / "store.json").write_bytes(content)
    with small_store(closed) as store:
        assert check(opaque(store), KEYS).all_ok


def test_a_store_of_a_newer_format_is_refused_and_not_touched(closed: Path) -> None:
    content = json.loads((closed / "store.json").read_bytes())
    content["format_version"] += 1
    (closed / "store.json").write_text(json.dumps(content))
    before = {path: path.read_bytes() for path in closed.rglob("*") if path.is_file()}
    with pytest.raises(StoreVersionError, match="newer gdsstore"):
        small_store(closed)
    assert {path: path.read_bytes() for path in closed.rglob("*") if path.is_file()} == before


def test_segments_without_their_store_json_stay_untouched_and_count(
    closed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new store beside old segments: it can read none of them, and must overwrite none."""
    (closed / "store.json").unlink()
    before = {path.name: path.read_bytes() for path in segments(closed)}
    with small_store(closed, capacity="20MiB") as store:
        assert "another store" in logged(caplog.records)
        namespace = opaque(store)
        assert not namespace.contains(KEYS).any()
        assert store.stats()["segments"]["lost"] == len(before)
        for turn in range(12):  # several times what fits
            save(namespace, make_keys(200, turn))
        assert store.stats()["physical_bytes"] <= 20 << 20
        assert store.stats()["segments_reclaimed"] > 0
    after = {path.name: path.read_bytes() for path in segments(closed)}
    assert {name: after[name] for name in before} == before


def test_two_stores_in_one_process_are_refused(closed: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(closed)
    with small_store(closed) as store:
        for path in (closed, link, closed / ".." / "s"):
            with pytest.raises(StoreBusyError, match="this process"):
                small_store(path)
        assert check(opaque(store), KEYS).all_ok
    with small_store(link) as store:
        assert check(opaque(store), KEYS).all_ok


def test_an_open_store_whose_directory_is_gone_is_in_nobodys_way(tmp_path: Path) -> None:
    lost = small_store(tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost")
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    lost.close(timeout_s=1)


def test_a_failed_open_leaves_nothing_open(closed: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    content = (closed / "store.json").read_bytes()
    (closed / "store.json").write_bytes(b"")
    for _ in range(3):
        with pytest.raises(StoreDamagedError):
            small_store(closed)
    (closed / "store.json").write_bytes(content)
    assert set(os.listdir("/proc/self/fd")) <= descriptors  # what other tests have left may go meanwhile
    with small_store(closed) as store:
        assert check(opaque(store), KEYS).all_ok


def test_a_closed_store_leaves_nothing_open(closed: Path) -> None:
    def use() -> None:
        with small_store(closed) as store:
            assert check(opaque(store), KEYS).all_ok
            assert save(opaque(store), make_keys(3, time.time_ns())).all_ok

    def descriptors() -> set[str]:
        gc.collect()  # a mapping of the heat file goes with the last array of it
        return set(os.listdir("/proc/self/fd"))

    use()  # what is loaded once a process
    before = descriptors()
    for _ in range(3):
        use()
    assert descriptors() <= before

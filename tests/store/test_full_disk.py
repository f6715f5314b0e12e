"""A full drive: saves fail, loads go on, room that comes back is used, and the process never dies.

In child processes: a store into a hole of a mapped file is SIGBUS, which kills whoever does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gdsstore import GdsStoreError
from tests.store.helpers import python, small_store, succeeded
from tests.store.mounts import fill_up, small_ext4, small_tmpfs

FILESYSTEMS: dict[str, Callable[[Path, int], AbstractContextManager[Path]]] = {
    "tmpfs": small_tmpfs,
    "ext4": small_ext4,
}
MEBIBYTES = 64

FILLS_UP = """
from tests.store.mounts import fill_up
from gdsstore.catalog import take
take.FULL_PAUSE_S = 0.0
root = Path(sys.argv[1])

settings = dict(capacity="1GiB", catalog_map_bytes="1GiB", engine=sys.argv[2], grace_s=3600)
with small_store(root / "s", **settings) as store:
    namespace, small = opaque(store), opaque(store, 100)
    kept = [make_keys(100, turn) for turn in range(8)]
    for keys in kept:
        assert save(namespace, keys).all_ok
        assert namespace.lookup(keys) == 100  # now they must stay
    ballast = fill_up(root, leave_bytes=int(sys.argv[3]))
    statuses_seen = set()
    for turn in range(60):  # small pages: they make the catalog and the heat file grow
        result = save(small, make_keys(400, turn), 100)
        statuses_seen |= set(result.reasons())
        good = make_keys(400, turn)[result.ok]
        assert check(small, good, 100).all_ok
        assert small.contains(good).all()
    assert statuses_seen <= {"SAVED", "FAILED_NO_SPACE"}, statuses_seen
    assert "FAILED_NO_SPACE" in statuses_seen
    more = make_keys(400, "more")
    assert save(namespace, more).count(PageStatus.FAILED_NO_SPACE) > 0
    for keys in kept:
        assert namespace.lookup(keys) == len(keys)
        assert check(namespace, keys).all_ok
    for turn in range(3):
        store.upkeep.turn()
    store.stats()
    assert store.stats()["pages_reclaimed"] == 0
    ids = max(row.segment_id for row in store._segments())
    ballast.unlink()
    assert save(namespace, more).all_ok
    assert check(namespace, more).all_ok
    assert max(row.segment_id for row in store._segments()) <= ids + 4  # the failed attempts used none up
    ballast = fill_up(root)
# Closed while the drive was full: that it is closed could not be noted, and nothing is lost by it.
ballast.unlink()
with small_store(root / "s", **settings) as store:
    for keys in kept:
        assert check(opaque(store), keys).all_ok
    assert check(opaque(store), more).all_ok
    assert not list((root / "s").glob("*.new"))
    assert not list((root / "s" / "segments").glob("*.partial"))
print("done")
"""


@pytest.mark.parametrize(
    ("filesystem", "left"), [("ext4", 0), ("ext4", 100_000), ("tmpfs", 0), ("tmpfs", 3 << 20)]
)
def test_saves_fail_and_loads_go_on_until_there_is_room_again(
    tmp_path: Path, filesystem: str, left: int
) -> None:
    with FILESYSTEMS[filesystem](tmp_path, MEBIBYTES) as root:
        assert succeeded(python(FILLS_UP, root, "posix", left)) == "done"


RECYCLES = """
from tests.store.mounts import fill_up
root = Path(sys.argv[1])
with small_store(root / "s", capacity="1GiB") as store:
    namespace = opaque(store)
    for turn in range(10):
        assert save(namespace, make_keys(200, turn)).all_ok
    ballast = fill_up(root)
    for turn in range(20, 60):
        assert save(namespace, make_keys(200, turn)).all_ok
        assert check(namespace, make_keys(200, turn)).all_ok
    assert store.stats()["pages_reclaimed"] > 0
print("done")
"""


def test_pages_that_nobody_was_promised_make_room_on_a_full_drive(tmp_path: Path) -> None:
    """Below its capacity the store then goes on with the segments that it has."""
    with small_ext4(tmp_path, MEBIBYTES) as root:
        assert succeeded(python(RECYCLES, root)) == "done"


def test_the_same_with_the_engine_that_is_used_by_default(tmp_path: Path) -> None:
    with small_ext4(tmp_path, MEBIBYTES) as root:
        assert succeeded(python(FILLS_UP, root, "auto", 0)) == "done"


OPENS = """
import shutil, signal, traceback
from gdsstore import GdsStoreError
from tests.store.mounts import fill_up
root, settings = Path(sys.argv[1]), dict(capacity="40MiB", catalog_map_bytes="1GiB", grace_s=3600)

def in_fork(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 1 if work() is False else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def make(die):
    store = small_store(root / "s", **settings)
    assert save(opaque(store), make_keys(100)).all_ok
    assert opaque(store).lookup(make_keys(100)) == 100
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()

def attempt():
    try:
        with small_store(root / "s", **settings) as store:
            namespace = opaque(store)
            for turn in range(3):
                assert check(namespace, make_keys(100)).all_ok
                assert namespace.lookup(make_keys(100)) == 100
                assert set(save(namespace, make_keys(100, turn)).reasons()) <= {"SAVED", "ALREADY_THERE", "FAILED_NO_SPACE"}
                namespace.contains(make_keys(100))
    except GdsStoreError as error:
        assert error.context.get("errno") == 28, error

def again():
    with small_store(root / "s", **settings) as store:
        assert save(opaque(store), make_keys(100, "more")).all_ok
        return check(opaque(store), make_keys(100)).all_ok

again()  # so that the children find everything loaded and compiled

SCENARIOS = {
    "closed": (0, 40_000, 1 << 20),
    "closed, no catalog": (40_000, 1 << 20, 5 << 20),
    "killed, no catalog": (0, 40_000, 1 << 20, 5 << 20, 9 << 20),  # these open without a check in a child, which takes long
    "killed, no catalog, no heat": (0, 40_000, 9 << 20),
    "killed, no locks": (0,),
    "killed, no heat": (40_000,),
}
for was, rooms in SCENARIOS.items():
    for left in rooms:
        shutil.rmtree(root / "s", ignore_errors=True)
        expected = -signal.SIGKILL if "killed" in was else 0
        assert in_fork(lambda: make("killed" in was)) == expected
        if "no catalog" in was:
            forget_catalog(root / "s")
        if "no heat" in was:
            (root / "s" / "heat").unlink()
        if "no locks" in was:
            for path in [*(root / "s").glob("*.lock"), root / "s" / "catalog" / "lock.mdb"]:
                path.unlink()
        ballast = fill_up(root, leave_bytes=left)
        code = in_fork(attempt)
        assert code == 0, (was, left, code)
        ballast.unlink()
        assert in_fork(again) == 0, (was, left)
print("done")
"""


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_opening_without_room_works_or_is_refused_and_kills_nobody(tmp_path: Path, filesystem: str) -> None:
    with FILESYSTEMS[filesystem](tmp_path, MEBIBYTES) as root:
        assert succeeded(python(OPENS, root, timeout_s=200)) == "done"


def test_a_new_store_without_room_is_refused_and_can_be_made_later(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, 24) as root:
        for left in (0, 4096, 300_000, 2 << 20):
            ballast = fill_up(root, leave_bytes=left)
            with contextlib.suppress(GdsStoreError):
                small_store(root / "s").close()
            ballast.unlink()
        small_store(root / "s", capacity="16MiB").close()

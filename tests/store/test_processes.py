"""Several processes share a store, and a forked child cannot harm its parent's."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from gdsstore import StoreBusyError, StoreClosedError
from tests.store.helpers import check, make_keys, opaque, save, segments, small_store, start_python

KEYS = make_keys(100)


def say(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def hear(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def finish(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0


OTHER = """
store = small_store(sys.argv[1], capacity=None)
print(store.opened.why, flush=True)
for line in sys.stdin:
    what, salt = line.split()
    namespace = opaque(store)
    if what == "save":
        print(save(namespace, make_keys(100, salt)).reasons(), flush=True)
    else:
        print(check(namespace, make_keys(100, salt)).reasons(), flush=True)
store.close()
"""


def test_processes_see_each_others_pages_at_once_and_may_change_nothing_about_the_store(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with small_store(path, capacity="64MiB") as store:
        assert save(opaque(store), make_keys(100, "mine")).all_ok
        other = start_python(OTHER, path)
        assert hear(other) == "other processes use it"
        say(other, "load mine")
        assert hear(other) == "{'LOADED': 100}"
        say(other, "save theirs")
        assert hear(other) == "{'SAVED': 100}"
        assert check(opaque(store), make_keys(100, "theirs")).all_ok
        assert save(opaque(store), make_keys(100, "theirs")).reasons() == {"ALREADY_THERE": 100}
    # The other one is still there.
    with pytest.raises(StoreBusyError, match="64"):
        small_store(path, capacity="32MiB")
    (path / "catalog" / "data.mdb").rename(path / "away")
    with pytest.raises(StoreBusyError, match="deleted"):
        small_store(path)
    (path / "away").rename(path / "catalog" / "data.mdb")
    with small_store(path, capacity="64MiB") as store:
        assert check(opaque(store), make_keys(100, "theirs")).all_ok
    finish(other)
    with small_store(path, capacity="32MiB") as store:
        assert store.capacity_bytes == 32 << 20
        assert store.opened.why == "it was closed cleanly"


def test_writers_do_not_share_a_segment_and_leave_it_to_the_next_when_they_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with small_store(path) as store:
        assert save(opaque(store), make_keys(10, "mine")).all_ok
        other = start_python(OTHER, path)
        hear(other)
        say(other, "save theirs")
        assert hear(other) == "{'SAVED': 100}"
        assert len(segments(path)) == 2
        other.kill()
        other.wait(30)
        assert save(opaque(store), make_keys(240, "more")).all_ok  # fills what both have begun
        assert len(segments(path)) == 3
        for salt, count in (("mine", 10), ("theirs", 100), ("more", 240)):
            assert check(opaque(store), make_keys(count, salt)).all_ok


def test_ranks_that_open_a_new_store_at_the_same_time_share_one(tmp_path: Path) -> None:
    program = """
    sys.stdin.readline()
    with small_store(sys.argv[1]) as store:
        namespace = opaque(store)
        assert save(namespace, make_keys(50, sys.argv[2])).all_ok
        print(store.uuid.hex(), flush=True)
        sys.stdin.readline()
        for rank in range(3):
            assert check(namespace, make_keys(50, rank)).all_ok
    """
    ranks = [start_python(program, tmp_path / "s", rank) for rank in range(3)]
    for rank in ranks:
        say(rank, "go")
    assert len({hear(rank) for rank in ranks}) == 1
    for rank in ranks:
        say(rank, "check")
    for rank in ranks:
        finish(rank)


# --- fork ---


def in_child(work: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Run `work` in a forked child; it must be true, and in time."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if work() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def test_a_forked_child_is_told_to_open_the_store_again_and_the_parent_goes_on(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        namespace = opaque(store)
        assert save(namespace, KEYS).all_ok

        def refused() -> bool:
            calls: list[Callable[[], object]] = [
                lambda: namespace.lookup(KEYS),
                lambda: save(namespace, KEYS),
                lambda: check(namespace, KEYS),
                lambda: namespace.delete(KEYS),
                store.stats,
                lambda: opaque(store),
            ]
            for call in calls:
                try:
                    call()
                except StoreClosedError as error:
                    if "fork" not in str(error):
                        return False
                else:
                    return False
            store.close()
            return True

        in_child(refused)
        assert check(namespace, KEYS).all_ok
        assert save(namespace, make_keys(10, "more")).all_ok
    with small_store(tmp_path / "s") as store:
        assert store.opened.why == "it was closed cleanly"


def test_a_forked_child_cannot_open_that_store_and_is_told_what_to_do_but_may_open_another(
    tmp_path: Path,
) -> None:
    """LMDB cannot be opened twice in a process, nor be closed in a child where the parent was writing."""
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok

        def refused() -> bool:
            try:
                small_store(tmp_path / "s")
            except StoreBusyError as error:
                if "spawn" not in str(error):
                    return False
            else:
                return False
            with small_store(tmp_path / "another") as mine:
                return bool(save(opaque(mine), KEYS).all_ok and check(opaque(mine), KEYS).all_ok)

        with store.catalog.write():  # as another thread might, at the moment of the fork
            in_child(refused)
        assert check(opaque(store), KEYS).all_ok


def test_a_child_does_not_hang_on_a_lock_that_another_thread_held_at_the_fork(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        namespace = opaque(store)
        assert save(namespace, KEYS).all_ok
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                namespace.lookup(KEYS[:2])

        with store._idle:  # as a thread of the parent might, at the moment of the fork

            def refused() -> bool:
                try:
                    namespace.lookup(KEYS)
                except StoreClosedError:
                    store.close()
                    return True
                return False

            in_child(refused)
        threads = [threading.Thread(target=busy) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                in_child(refused)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_locks_do_not_outlive_the_parent_in_its_children(tmp_path: Path) -> None:
    """A child that lives on (a tokenizer, a logger) must not keep others from the store, nor its segments from being filled."""
    path = tmp_path / "s"
    parent = start_python(
        """
        import threading
        store = small_store(sys.argv[1])
        assert save(opaque(store), make_keys(10)).all_ok
        store.upkeep.turn()
        inside, over = threading.Event(), threading.Event()
        def hold():  # as another thread may that opens or closes the store
            with store.locks.opening():
                inside.set()
                over.wait()
        holder = threading.Thread(target=hold)
        holder.start()
        inside.wait()
        pid = os.fork()
        if pid == 0:
            import time
            time.sleep(600)
            os._exit(0)
        over.set()
        holder.join()
        print(pid, flush=True)
        sys.stdin.read()
        """,
        path,
    )
    child = int(hear(parent))
    try:
        parent.kill()
        parent.wait(30)
        with small_store(path, capacity="32MiB") as store:  # alone, or the capacity could not be changed
            assert "checked" in store.opened.why
            assert check(opaque(store), make_keys(10)).all_ok
            assert save(opaque(store), make_keys(10, "more")).all_ok
            assert len(segments(path)) == 1
            store.upkeep.turn()
            assert store.stats()["maintainer"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_lock_of_a_segment_being_filled_is_held(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), make_keys(10)).all_ok
        with segments(tmp_path / "s")[0].open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with segments(tmp_path / "s")[0].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

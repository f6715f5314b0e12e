"""Whether the catalog's files may be opened, and who uses a store."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

import pytest

from gdsstore.catalog import state as state_module
from gdsstore.catalog.index import Catalog
from gdsstore.catalog.state import (
    Locks,
    State,
    Trust,
    boot_id,
    catalog_mark,
    delete_catalog,
    judge,
    read_state,
    write_state,
)
from gdsstore.errors import DeadlineError, VolumeError
from tests.catalog.model import run_of


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    directory = tmp_path / "catalog"
    directory.mkdir()
    made = Catalog(directory, 16 << 20)
    with made.write() as txn:
        made.commit(txn, b"n" * 16, [run_of(list(range(1000)), 0, 0, 1)])
    made.sync()
    made.close()
    return directory


def clean(catalog: Path) -> State:
    return State(boot_id(), True, 1 << 30, catalog_mark(catalog))


def verdict(state: State, catalog: Path, *, alone: bool = True) -> Trust:
    return judge(state, catalog, alone)[0]


def test_a_catalog_that_was_closed_cleanly_is_used(catalog: Path) -> None:
    assert verdict(clean(catalog), catalog) is Trust.USE


def test_a_clean_catalog_is_used_after_a_reboot(catalog: Path) -> None:
    state = clean(catalog)
    assert (
        verdict(State("another boot", True, state.capacity_bytes, state.catalog_mark), catalog) is Trust.USE
    )


@pytest.mark.parametrize("seed", range(10))
def test_pages_in_each_others_place_are_noticed(catalog: Path, seed: int) -> None:
    """A tree with two leaves exchanged can be read to its end; a write to it aborts the process."""
    died = State(boot_id(), False, 1 << 30, "")
    assert verdict(died, catalog) is Trust.USE
    file = catalog / "data.mdb"
    raw = bytearray(file.read_bytes())
    starts = range(2 * 4096, len(raw), 4096)
    leaves = [
        at for at in starts if raw[at : at + 8] == (at // 4096).to_bytes(8, "little") and raw[at + 10] == 2
    ]
    a, b = random.Random(seed).sample(leaves, 2)
    raw[a : a + 4096], raw[b : b + 4096] = raw[b : b + 4096], raw[a : a + 4096]
    file.write_bytes(raw)
    assert verdict(died, catalog) is Trust.REBUILD


def test_a_catalog_whose_values_take_several_pages_is_used(catalog: Path) -> None:
    """What is inside of such a value is no page, whatever it looks like."""
    made = Catalog(catalog, 64 << 20)
    for turn in range(3):  # long lists of free pages, and parts of old ones
        for n in range(1 + turn, 60, 3):
            with made.write() as txn:
                made.commit(txn, b"n" * 16, [run_of(list(range(1000 * n, 1000 * n + 1000)), n, 0, 1)])
        with made.write() as txn:
            for n in range(1, 60):
                made.drop_pages(txn, n)
    made.close()
    assert verdict(State(boot_id(), False, 1 << 30, ""), catalog) is Trust.USE


def test_a_missing_catalog_is_rebuilt(catalog: Path) -> None:
    state = clean(catalog)
    delete_catalog(catalog)
    delete_catalog(catalog)
    assert verdict(state, catalog) is Trust.REBUILD
    assert verdict(state, catalog, alone=False) is Trust.REBUILD


def test_a_catalog_that_was_touched_after_the_close_is_rebuilt(catalog: Path) -> None:
    state = clean(catalog)
    with (catalog / "data.mdb").open("r+b") as file:
        file.seek(8192)
        file.write(b"x")
    assert verdict(state, catalog) is Trust.REBUILD


def test_after_a_power_loss_the_catalog_is_not_even_opened(
    catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> str:
        raise AssertionError("a catalog that saw a power loss was opened")

    monkeypatch.setattr(state_module, "check", never)
    assert verdict(State("another boot", False, 0, ""), catalog) is Trust.REBUILD
    assert verdict(State(), catalog) is Trust.REBUILD


def test_after_the_death_of_its_user_a_catalog_is_checked_in_a_child(catalog: Path) -> None:
    dirty = State(boot_id(), False, 0, "")
    assert verdict(dirty, catalog) is Trust.USE


@pytest.mark.parametrize("damage", ["zeroed", "noise", "cut", "emptied"])
def test_a_catalog_that_fails_its_check_is_rebuilt_and_the_damage_kills_nobody(
    catalog: Path, damage: str
) -> None:
    data = catalog / "data.mdb"
    used = 30 * 4096
    with data.open("r+b") as file:
        if damage == "cut":
            file.truncate(3 * 4096)
        elif damage == "emptied":
            file.truncate(0)
        else:
            file.seek(2 * 4096)
            file.write(bytes(used) if damage == "zeroed" else os.urandom(used))
    assert verdict(State(boot_id(), False, 0, ""), catalog) is Trust.REBUILD


def test_a_check_that_does_not_end_counts_as_failed(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "CHECK_TIMEOUT_S", 0.001)
    assert verdict(State(boot_id(), False, 0, ""), catalog) is Trust.REBUILD


def test_a_catalog_in_use_is_used(catalog: Path) -> None:
    assert verdict(State("another boot", False, 0, ""), catalog, alone=False) is Trust.USE


def test_the_state_survives_the_round_trip(tmp_path: Path) -> None:
    state = State("boot", True, 5 << 30, "mark")
    write_state(tmp_path / "state.json", state)
    assert read_state(tmp_path / "state.json") == state
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"boot_id": 3}',
        b"\xff",
        b'{"boot_id":"b","clean":1,"capacity_bytes":1,"catalog_mark":""}',
    ],
)
def test_a_damaged_state_reads_as_not_clean(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.json"
    assert read_state(path) == State()
    path.write_bytes(content)
    assert read_state(path) == State()


def test_a_link_in_place_of_the_state_is_not_followed(tmp_path: Path) -> None:
    write_state(tmp_path / "elsewhere", State("boot", True, 1, ""))
    (tmp_path / "state.json").symlink_to(tmp_path / "elsewhere")
    assert read_state(tmp_path / "state.json") == State()


def test_only_one_is_alone_and_only_one_maintains(tmp_path: Path) -> None:
    first, second = Locks(tmp_path), Locks(tmp_path)
    assert first.alone()
    assert not second.alone()
    assert not first.alone()
    assert first.try_maintainer()
    assert first.try_maintainer()
    assert not second.try_maintainer()
    first.close()
    assert second.alone()
    assert second.try_maintainer()
    second.close()
    second.close()


def test_a_process_that_hangs_while_it_opens_the_store_holds_others_up_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "LOCK_TIMEOUT_S", 0.05)
    locks, other = Locks(tmp_path), Locks(tmp_path)
    with locks.opening(), pytest.raises(DeadlineError, match="opening"), other.opening():
        pass
    with other.opening():
        pass
    locks.close()
    other.close()


@pytest.mark.parametrize("name", ["users.lock", "maintainer.lock", "open.lock"])
def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VolumeError, match="lock"):
        locks = Locks(tmp_path)
        with locks.opening():
            pass


def test_locks_are_closed_for_programs_that_are_started(tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in locks.fds)
    locks.close()


def test_who_had_a_store_open_that_was_deleted_is_not_alone_in_the_next_one(tmp_path: Path) -> None:
    """It would mark the catalog of that store as cleanly closed, under those who use it."""
    old = Locks(tmp_path)
    (tmp_path / "users.lock").unlink()
    assert not old.alone()
    new = Locks(tmp_path)
    assert not old.alone()
    assert new.alone()
    old.close()
    new.close()

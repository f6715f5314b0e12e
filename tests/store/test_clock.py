"""A clock that goes back: what was deleted or cleared stays so, what was saved stays saved."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gdsstore.sequence import Sequencer
from tests.store.helpers import (
    check,
    forget_catalog,
    make_keys,
    opaque,
    save,
    small_store,
    start_python,
)

KEYS = make_keys(30)
HOUR_NS = 3600 * 10**9


class Clock:
    now = 1_700_000_000 * 10**9

    def time_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.time_ns", made.time_ns)
    return made


def test_numbers_rise_whatever_the_clock_does(clock: Clock) -> None:
    sequencer = Sequencer(behind=clock.now + 10)
    assert sequencer.take(5) == clock.now + 11
    assert sequencer.take() == clock.now + 16
    clock.now -= HOUR_NS
    assert sequencer.take(3) == clock.now + HOUR_NS + 17
    clock.now += 2 * HOUR_NS
    assert sequencer.take() == clock.now


@pytest.mark.parametrize("restart", [False, True])
def test_a_clear_and_a_delete_hold_and_later_pages_stay(tmp_path: Path, clock: Clock, restart: bool) -> None:
    path = tmp_path / "s"
    store = small_store(path)
    one, two = opaque(store), opaque(store, pool="two")
    assert save(one, KEYS).all_ok
    assert save(two, KEYS).all_ok
    clock.now -= HOUR_NS
    assert one.delete(KEYS[:10]).all()
    assert two.clear() == 30
    if restart:
        store.close()
        store = small_store(path)
    clock.now -= HOUR_NS
    assert save(opaque(store, pool="two"), KEYS[:5]).all_ok
    assert save(opaque(store), KEYS[:5]).all_ok
    store.close()
    forget_catalog(path)
    with small_store(path) as store:
        assert opaque(store).contains(KEYS).tolist() == [True] * 5 + [False] * 5 + [True] * 20
        assert opaque(store, pool="two").contains(KEYS).tolist() == [True] * 5 + [False] * 25
        assert check(opaque(store), KEYS).ok.sum() == 25


@pytest.mark.parametrize("drop", ["delete", "clear", "delete after a rebuild"])
def test_what_is_saved_after_a_restart_with_an_earlier_clock_is_newer_than_what_was_dropped_before(
    tmp_path: Path, clock: Clock, drop: str
) -> None:
    path = tmp_path / "s"
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
        if drop == "clear":
            assert opaque(store).clear() == 30
        else:
            assert opaque(store).delete(KEYS).all()
    clock.now -= HOUR_NS
    if drop == "delete after a rebuild":
        forget_catalog(path)
        (path / "heat").unlink()
    with small_store(path) as store:
        assert save(opaque(store), KEYS[:5]).all_ok
    forget_catalog(path)
    with small_store(path) as store:
        assert opaque(store).contains(KEYS).tolist() == [True] * 5 + [False] * 25


ANOTHER = """
import time
back_ns = int(sys.argv[2])
really = time.time_ns
time.time_ns = lambda: really() - back_ns
with small_store(sys.argv[1]) as store:
    print("open", flush=True)
    while (line := sys.stdin.readline().strip()):
        what, first, last = line.split()
        keys = make_keys(60)[int(first):int(last)]
        if what == "save":
            assert save(opaque(store), keys).all_ok
        elif what == "delete":
            assert opaque(store).delete(keys).all()
        else:
            assert opaque(store).clear() == len(keys)
        print("done", flush=True)
"""


@pytest.mark.parametrize("drop", ["delete 0 30", "clear 0 30"])
@pytest.mark.parametrize("ahead", ["what drops", "what saves"])
def test_processes_whose_clocks_differ_agree_on_what_was_first(tmp_path: Path, drop: str, ahead: str) -> None:
    """A process keeps counting where it was when the clock went back; one that is opened later starts with the new time."""
    path = tmp_path / "s"
    small_store(path).close()
    backs = [0, HOUR_NS] if ahead == "what drops" else [HOUR_NS, 0]
    dropping, saving = (start_python(ANOTHER, path, back) for back in backs)

    def tell(child: subprocess.Popen[str], line: str) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        print(line, file=child.stdin, flush=True)
        assert child.stdout.readline().strip() == "done"

    for child in (dropping, saving):
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "open"
    tell(saving, "save 0 30")
    tell(dropping, drop)
    tell(saving, "save 0 5")
    for child in (dropping, saving):
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 0
    forget_catalog(path)
    with small_store(path) as store:
        assert opaque(store).contains(KEYS).tolist() == [True] * 5 + [False] * 25


def test_a_reused_segment_gets_a_new_generation_though_the_clock_went_back(
    tmp_path: Path, clock: Clock
) -> None:
    with small_store(tmp_path / "s", capacity="16MiB") as store:
        for turn in range(12):
            clock.now -= HOUR_NS
            assert save(opaque(store), make_keys(200, turn)).all_ok
            assert check(opaque(store), make_keys(200, turn)).all_ok
        assert store.stats()["pages_reclaimed"] > 0
    forget_catalog(tmp_path / "s")
    with small_store(tmp_path / "s", capacity="16MiB") as store:
        for turn in range(12):
            check(opaque(store), make_keys(200, turn))
        assert check(opaque(store), make_keys(200, 11)).all_ok


def test_a_clear_holds_though_the_namespaces_file_was_damaged_under_the_open_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with small_store(path) as store:
        assert save(opaque(store), KEYS).all_ok
        (file,) = (path / "namespaces").iterdir()
        bound = opaque(store)
        file.write_bytes(b"{")
        assert bound.clear() == 30
    forget_catalog(path)
    with small_store(path) as store:
        assert not opaque(store).contains(KEYS).any()

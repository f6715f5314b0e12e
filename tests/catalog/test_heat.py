"""Heat: what was used last is known as such, over processes, restarts and a clock that goes back."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.catalog import heat as heat_module
from gdsstore.catalog.heat import PREFIX_SKEW, TICKS_PER_S, Heat
from gdsstore.errors import StoreError
from tests.store.helpers import check, make_keys, opaque, save, small_store

SEGMENT_BYTES = 1 << 20
SLOTS = SEGMENT_BYTES // 4096
YEAR_S = 365 * 86400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heat_module, "time", made)
    return made


@pytest.fixture
def heat(tmp_path: Path, clock: Clock) -> Iterator[Heat]:
    made = Heat(tmp_path / "heat", SEGMENT_BYTES)
    yield made
    made.close()


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def is_allocated(path: Path) -> bool:
    return path.stat().st_blocks * 512 >= path.stat().st_size


def test_ages_count_from_the_last_use(heat: Heat, clock: Clock) -> None:
    heat.touch(u32(2, 2), u32(0, 5))
    clock.now += 10
    heat.touch(u32(2), u32(5))
    clock.now += 1
    ages = heat.ages(2, 7)
    assert ages[[0, 5]] == pytest.approx([11, 1], abs=0.1)
    assert (ages[[1, 2, 3, 4, 6]] > YEAR_S).all()


def test_pages_further_down_a_prefix_are_older_so_that_leaves_go_first(heat: Heat) -> None:
    n = 4 * PREFIX_SKEW
    heat.touch(np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32))
    ages = heat.ages(0, n)
    assert (np.diff(ages) >= 0).all()
    assert ages[-1] - ages[0] == pytest.approx((n - 1) // PREFIX_SKEW / TICKS_PER_S)


def test_what_was_looked_up_is_protected_for_the_grace_period_and_no_longer(heat: Heat, clock: Clock) -> None:
    heat.looked_up(u32(3, 3, 4))
    assert heat.protected(3, 30)
    assert heat.protected(4, 30)
    assert not heat.protected(5, 30)
    assert not heat.protected(3, 0)
    clock.now += 29
    assert heat.protected(3, 30)
    clock.now += 2
    assert not heat.protected(3, 30)


@pytest.mark.parametrize("back_s", [1, 3600, 5 * YEAR_S])
def test_after_the_clock_went_back_stamps_count_as_fresh_and_protect_no_longer_than_the_grace(
    heat: Heat, clock: Clock, back_s: float
) -> None:
    heat.touch(u32(1), u32(0))
    heat.looked_up(u32(1))
    clock.now -= back_s
    ages = heat.ages(1, 1)
    assert ages.min() >= 0
    if back_s < YEAR_S:
        assert ages[0] == 0
    assert heat.protected(1, 30) == (back_s < 30)
    heat.touch(u32(1), u32(0))  # and use goes on as usual
    clock.now += 5
    assert heat.ages(1, 1)[0] == pytest.approx(5, abs=0.1)


def test_stamps_survive_the_process_and_are_seen_by_others(heat: Heat, clock: Clock, tmp_path: Path) -> None:
    heat.touch(u32(1), u32(3))
    other = Heat(tmp_path / "heat", SEGMENT_BYTES)
    other.touch(u32(200_000 // 1000), u32(7))  # grows the file: the first one must follow
    clock.now += 4
    assert other.ages(1, 4)[3] == pytest.approx(4, abs=0.1)
    assert heat.ages(200, 8)[7] == pytest.approx(4, abs=0.1)
    other.close()
    assert stat.S_IMODE((tmp_path / "heat").stat().st_mode) == 0o600


def test_a_reset_forgets_a_segment_and_no_other(heat: Heat) -> None:
    heat.touch(u32(1, 2), u32(0, 0))
    heat.looked_up(u32(1, 2))
    heat.reset(1)
    assert heat.ages(1, 1)[0] > YEAR_S
    assert heat.ages(2, 1)[0] < 1
    assert not heat.protected(1, 30)
    assert heat.protected(2, 30)


def test_a_full_drive_costs_recency_and_no_more(heat: Heat, monkeypatch: pytest.MonkeyPatch) -> None:
    heat.touch(u32(0), u32(0))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    heat.touch(u32(200_000), u32(0))
    heat.looked_up(u32(200_000))
    with pytest.raises(StoreError) as caught:
        heat.cover(200_000)
    assert caught.value.context["errno"] == errno.ENOSPC
    assert heat.ages(0, 1)[0] < 1


def test_a_store_whose_heat_file_was_lost_goes_on_reclaiming_on_a_full_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with small_store(path, capacity="16MiB") as store:
        for turn in range(12):
            assert save(opaque(store), make_keys(100, turn)).all_ok
    (path / "heat").unlink()

    def full(heat: Heat, segment_id: int) -> None:
        raise StoreError("cannot grow the heat file", errno=errno.ENOSPC)

    monkeypatch.setattr(Heat, "cover", full)
    with small_store(path, capacity="16MiB") as store:
        reclaimed = store.reclaimer.counts.segments
        for turn in range(12, 24):
            assert save(opaque(store), make_keys(100, turn)).all_ok
            assert check(opaque(store), make_keys(100, turn)).all_ok
        assert store.reclaimer.counts.segments > reclaimed


def test_the_file_has_blocks_for_all_that_is_mapped(heat: Heat, tmp_path: Path) -> None:
    """A store into a hole of the mapping would kill the process on a full drive."""
    heat.cover(3000)
    assert is_allocated(tmp_path / "heat")
    assert heat.used_bytes >= 4 * SLOTS * 3001


@pytest.mark.parametrize("damage", ["garbage", "empty", "short", "cut", "other segment size", "sparse"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "heat"
    Heat(path, SEGMENT_BYTES).close()
    size = path.stat().st_size
    match damage:
        case "garbage":
            path.write_bytes(os.urandom(10_000))
        case "empty":
            os.truncate(path, 0)
        case "short":
            os.truncate(path, 10)
        case "cut":
            os.truncate(path, 4096 + 100)
        case "other segment size":
            path.unlink()
            Heat(path, 2 * SEGMENT_BYTES).close()
        case "sparse":
            head = path.read_bytes()[:4096]
            os.truncate(path, 0)
            path.write_bytes(head)
            os.truncate(path, size)
    heat = Heat(path, SEGMENT_BYTES)
    heat.touch(u32(0, 9), u32(0, SLOTS - 1))
    heat.looked_up(u32(0, 9))
    assert heat.ages(9, SLOTS)[SLOTS - 1] < 1
    assert heat.protected(9, 30)
    assert is_allocated(path)
    assert [file.name for file in tmp_path.iterdir()] == ["heat"]
    heat.close()


@pytest.mark.parametrize("damage", [b"x", b""])
def test_a_damaged_file_that_others_have_mapped_is_not_cut_under_them(
    heat: Heat, tmp_path: Path, damage: bytes
) -> None:
    """They would die of SIGBUS; so it is replaced."""
    path = tmp_path / "heat"
    if damage:
        with path.open("r+b") as file:
            file.write(damage)
    else:
        path.unlink()
    other = Heat(path, SEGMENT_BYTES)
    for each in (heat, other):
        each.touch(u32(0), u32(0))
        each.looked_up(u32(0))
        assert each.ages(0, 1)[0] < 1
    other.close()


def test_a_new_file_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one server open a new store at the same time: none may see, or cut, what another has half made."""
    path, seen = tmp_path / "heat", []
    real = os.pwrite

    def meanwhile(fd: int, data: bytes, offset: int) -> int:
        if not seen:
            seen.append([file.name for file in tmp_path.iterdir() if file.name == "heat"])
            first = Heat(path, SEGMENT_BYTES)
            first.touch(u32(0), u32(1))
            first.close()
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", meanwhile)
    second = Heat(path, SEGMENT_BYTES)
    assert seen == [[]]
    assert second.ages(0, 2)[1] < 1  # both use the file of the quicker one
    second.close()


def test_a_full_drive_leaves_no_half_made_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="heat"):
        Heat(tmp_path / "heat", SEGMENT_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "heat").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="heat"):
        Heat(tmp_path / "heat", SEGMENT_BYTES)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_segment_ids_end_with_a_clear_error(heat: Heat) -> None:
    with pytest.raises(StoreError, match="used up"):
        heat.cover(1 << 18)

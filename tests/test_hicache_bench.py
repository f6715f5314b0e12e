"""The parts of `bench/hicache.py` that need no SGLang: what counts as a failure, and what it says where SGLang is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gdsstore.engines.base import Op
from gdsstore.errors import GdsStoreError
from gdsstore.replay.truth import count_wrong, fill_pages

REPO = Path(__file__).resolve().parents[1]
COUNT, PAGE_BYTES = 4, 4096

U8 = npt.NDArray[np.uint8]


class Memory:
    """Stands in for a host pool."""

    count, page_bytes = COUNT, PAGE_BYTES

    def __init__(self) -> None:
        self.pages = np.zeros((COUNT, PAGE_BYTES), np.uint8)

    def indices(self, place: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        return place

    def fill(self, keys: U8, place: npt.NDArray[np.intp]) -> None:
        fill_pages(self._ordered(keys, place), self.pages)

    def blank(self) -> None:
        self.pages[:] = 0

    def wrong(self, keys: U8, place: npt.NDArray[np.intp]) -> int:
        return len(count_wrong(self._ordered(keys, place), self.pages))

    def _ordered(self, keys: U8, place: npt.NDArray[np.intp]) -> U8:
        ordered = np.empty_like(keys)
        ordered[place] = keys
        return ordered


class Backend:
    """Keeps pages in a dictionary; `damage` is done to the pool after a load."""

    def __init__(self, memory: Memory, damage: str = "") -> None:
        self.name, self.memory, self.damage = "backend", memory, damage
        self.stored: dict[str, U8] = {}

    def save(self, keys: list[str], indices: Any) -> bool:
        self.stored = {key: self.memory.pages[at].copy() for key, at in zip(keys, indices, strict=True)}
        return self.damage != "refused"

    def before_load(self, keys: list[str]) -> None: ...

    def load(self, keys: list[str], indices: Any) -> int:
        for key, at in zip(keys, indices, strict=True):
            self.memory.pages[at] = self.stored[key]
        if self.damage == "flipped":
            self.memory.pages[2, 5] ^= 1
        if self.damage == "left out":
            self.memory.pages[3] = 0
        return COUNT - 1 if self.damage == "missed" else COUNT

    def exists(self, keys: list[str]) -> int:
        return COUNT

    def close(self) -> None: ...


class Ceiling:
    def run(self, op: Op, block_bytes: int, count: int, rng: np.random.Generator) -> float:
        return 0.25


def take_turns(monkeypatch: pytest.MonkeyPatch, damage: str, rounds: int = 3) -> list[Any]:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    from hicache_parts import rounds as parts

    memory = Memory()
    rows: list[Any] = parts.take_turns(
        [Backend(memory, damage)], memory, Ceiling(), rounds, np.random.default_rng(1)
    )
    return rows


def test_the_warm_up_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    save, load = take_turns(monkeypatch, "")
    assert (save.direction, load.direction) == ("save", "load")
    assert save.rounds == load.rounds == 3
    assert save.ratio > 1  # the ceiling takes its time here


@pytest.mark.parametrize("damage", ["flipped", "left out", "missed", "refused"])
def test_a_page_that_is_missing_or_wrong_ends_the_bench(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GdsStoreError):
        take_turns(monkeypatch, damage)


def test_without_sglang_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    hidden = (
        "import runpy, sys; sys.modules['sglang'] = None; sys.argv = sys.argv[1:]; sys.path[0] = 'bench'; "
    )
    command = [sys.executable, "-c", hidden + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    done = subprocess.run(
        [*command, "bench/hicache.py", "--json", "-", "--directory", str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "sglang is not installed" in done.stderr
    assert list(tmp_path.iterdir()) == []

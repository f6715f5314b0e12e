"""A store outlives kill -9 of its users, whenever it comes: it opens, holds what was promised, and serves no wrong byte."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash.journal import lines, phases, read_ledger
from tests.crash.kills import Kill
from tests.crash.processes import Worker, Zygote
from tests.crash.stores import LARGE, PAGES_A_LIFE, SMALL, blame, first_spec, run, start
from tests.crash.worker import Spec

pytestmark = pytest.mark.crash


def kill_in_a_row(
    zygote: Zygote, spec: Spec, kills: int, rng: random.Random, lose_catalog: float = 0.0
) -> None:
    """Each life begins with a check of what the killed ones before it promised. The first and the last end by themselves.

    Without the first, a drive that takes a quarter of a second a sync leaves nothing to check: every life dies too young.
    """
    done = lives = 0
    journal = Path(spec.journal)
    first = run(zygote, replace(spec, opens=3, seed=rng.randrange(1 << 32), seconds=120.0))
    assert first.code == 0, blame(spec, first)
    assert "saved" in phases(journal, first.pid), "the first life saved nothing"
    while done < kills:
        lives += 1
        assert lives < 3 * kills, "the workers end before they are killed"
        if rng.random() < lose_catalog:
            shutil.rmtree(Path(spec.store) / "catalog", ignore_errors=True)
        worker = start(zygote, replace(spec, seed=rng.randrange(1 << 32)))
        kill = Kill.draw(rng)
        killed = kill.do(worker, journal)
        assert killed or worker.code == 0, f"{kill} {blame(spec, worker)}"
        assert not read_ledger(journal).failures, blame(spec, worker)
        done += killed
    final_check(zygote, spec)


def final_check(zygote: Zygote, spec: Spec) -> None:
    """Twice: as the last kill left the store, and from nothing but the segments."""
    for _ in range(2):
        worker = run(zygote, replace(spec, opens=1, calls_per_open=0, check_first=True, alone=True))
        assert worker.code == 0, blame(spec, worker)
        last = [word for word in phases(Path(spec.journal), worker.pid) if word.startswith("checked")][-1]
        assert last != "checked 0" or not spec.lossless, "nothing was tested"
        shutil.rmtree(Path(spec.store) / "catalog")
    # A store that reclaims all the time may have nothing left just now, but not after every one of so many kills.
    checks = [line.split()[-1] for line in lines(Path(spec.journal)) if " phase checked " in line]
    assert any(count != "0" for count in checks), "nothing was tested"


@pytest.mark.parametrize("durability", ["none", "interval", "commit"])
@pytest.mark.parametrize("engine", ["posix", "auto"])
def test_no_acknowledged_page_is_lost_when_a_writer_is_killed(
    zygote: Zygote, place: Path, seed: int, durability: str, engine: str
) -> None:
    settings = LARGE | {"durability": durability, "engine": engine}
    spec = first_spec(place, seed, settings=settings, new_pages=PAGES_A_LIFE)
    kill_in_a_row(zygote, spec, 14, random.Random(seed))


@pytest.mark.parametrize("engine", ["posix", "auto"])
def test_a_rebuild_that_is_killed_loses_nothing(zygote: Zygote, place: Path, seed: int, engine: str) -> None:
    spec = first_spec(place, seed, settings=LARGE | {"engine": engine}, new_pages=PAGES_A_LIFE)
    kill_in_a_row(zygote, spec, 16, random.Random(seed), lose_catalog=0.6)


@pytest.mark.parametrize("durability", ["none", "interval", "commit"])
@pytest.mark.parametrize("engine", ["posix", "auto"])
def test_a_killed_reclaim_never_yields_a_wrong_page(
    zygote: Zygote, place: Path, seed: int, durability: str, engine: str
) -> None:
    settings = SMALL | {"durability": durability, "engine": engine}
    spec = first_spec(place, seed, settings=settings, lossless=False)
    kill_in_a_row(zygote, spec, 10, random.Random(seed), lose_catalog=0.1)
    counts = [line.split()[-1] for line in lines(Path(spec.journal)) if " reclaimed " in line]
    assert any(count != "0" for count in counts), "nothing was reclaimed"


@pytest.mark.parametrize(
    ("settings", "lossless"),
    [(LARGE, True), (LARGE | {"engine": "posix"}, True), (SMALL, False)],
    ids=["", "posix", "small"],
)
def test_the_others_go_on_when_one_of_three_is_killed(
    zygote: Zygote, place: Path, seed: int, settings: dict[str, Any], lossless: bool
) -> None:
    rng = random.Random(seed)
    new_pages = PAGES_A_LIFE if lossless else 1_000_000
    spec = first_spec(
        place,
        seed,
        settings=settings,
        lossless=lossless,
        alone=False,
        share=0.4,
        new_pages=new_pages,
        check_first=False,
    )
    journal = Path(spec.journal)
    workers: dict[int, Worker] = {}
    kills = 0
    while kills < 20:
        for lane in range(1, 4):
            if lane not in workers:
                workers[lane] = start(zygote, replace(spec, lane=lane, seed=rng.randrange(1 << 32)))
        lane = rng.randrange(1, 4)
        kill = Kill.draw(rng)
        killed = kill.do(workers[lane], journal)
        assert killed or workers[lane].code == 0, f"{kill} {blame(spec, workers[lane])}"
        kills += killed
        del workers[lane]
        for other in workers.values():
            count = phases(journal, other.pid).count("saved")
            assert other.wait_for_phase(journal, "saved", count + 1) or other.code == 0, blame(spec, other)
    journal.with_name("stop").touch()
    for worker in workers.values():
        assert worker.wait() == 0, blame(spec, worker)
    journal.with_name("stop").unlink()
    final_check(zygote, spec)

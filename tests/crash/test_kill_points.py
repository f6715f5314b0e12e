"""A process that dies between any two steps of making or rebuilding leaves a store that opens and lost nothing."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.crash.journal import phases
from tests.crash.processes import Worker, Zygote
from tests.crash.stores import LARGE, blame, first_spec, run
from tests.crash.worker import Spec

pytestmark = pytest.mark.crash

STEPS_AT_ONCE = 7  # a step is skipped now and then: over several runs all of them are met


def died_where(spec: Spec, worker: Worker) -> str | None:
    return next((word for word in phases(Path(spec.journal), worker.pid) if word.startswith("dies")), None)


@pytest.mark.parametrize("volumes", [1, 2])
def test_a_store_opens_whenever_its_making_was_cut_off(
    zygote: Zygote, place: Path, seed: int, volumes: int
) -> None:
    more = [str(place / "store" / f"volume{number}") for number in range(1, volumes)]
    spec = first_spec(
        place, seed, settings=LARGE | {"engine": "posix"}, opens=1, calls_per_open=4, more_volumes=more
    )
    rng = random.Random(seed)
    step = 0
    while True:
        step += rng.randrange(1, STEPS_AT_ONCE)
        shutil.rmtree(spec.store, ignore_errors=True)
        Path(spec.journal).unlink(missing_ok=True)
        worker = run(zygote, replace(spec, die_at=step))
        where = died_where(spec, worker)
        after = run(zygote, replace(spec, seed=seed + 1))
        assert after.code == 0, f"step {step}, {where}: {blame(spec, after)}"
        if where is None:
            break
    assert step > 30, "the making has more steps than that"


def test_a_rebuild_may_be_cut_off_at_any_step(zygote: Zygote, place: Path, seed: int) -> None:
    spec = first_spec(place, seed, settings=LARGE | {"engine": "posix"}, opens=1, calls_per_open=40)
    rng = random.Random(seed)
    assert run(zygote, spec).code == 0
    step = 0
    while True:
        step += rng.randrange(1, 3)
        shutil.rmtree(Path(spec.store) / "catalog")
        worker = run(zygote, replace(spec, die_at=step, calls_per_open=0))
        where = died_where(spec, worker)
        after = run(zygote, replace(spec, calls_per_open=0))
        assert after.code == 0, f"step {step}, {where}: {blame(spec, after)}"
        if where is None:
            break
    assert step > 10

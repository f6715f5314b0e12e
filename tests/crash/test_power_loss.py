"""A store outlives power cuts: what was durable loads, whatever else the drive kept; and no byte is wrong."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash.journal import phases
from tests.crash.processes import Zygote
from tests.crash.stores import LARGE, SMALL, blame, first_spec, run

pytestmark = pytest.mark.crash

IMAGES = 17  # a row; each is the store that the next worker begins with
STEPS = 400  # about as many as a life has
NO_UPKEEP = {"maintain": False, "sync_interval_s": 3600.0}


@pytest.mark.parametrize("engine", ["posix", "auto"])
@pytest.mark.parametrize(
    ("settings", "lossless"),
    [
        (LARGE | {"durability": "commit"}, True),
        (LARGE | NO_UPKEEP | {"durability": "interval"}, True),  # only `sync` makes durable
        (SMALL | {"durability": "interval"}, False),
    ],
    ids=["commit", "sync", "small"],
)
def test_durable_pages_outlive_power_cuts(
    zygote: Zygote, place: Path, seed: int, settings: dict[str, Any], lossless: bool, engine: str
) -> None:
    rng = random.Random(seed)
    spec = first_spec(
        place, seed, settings=settings | {"engine": engine}, lossless=lossless, torn=True, opens=2
    )
    spec = replace(spec, calls_per_open=60, new_pages=150 if lossless else 1_000_000)
    store, image = Path(spec.store), place / "image"
    store.mkdir()
    cuts = 0
    while cuts < IMAGES:
        life = replace(spec, seed=rng.randrange(1 << 32), die_at=rng.randrange(1, STEPS), image=str(image))
        worker = run(zygote, life)
        cut = any(word.startswith("dies") for word in phases(Path(spec.journal), worker.pid))
        assert worker.code == (-9 if cut else 0), f"cut {cuts} {blame(life, worker)}"
        if cut:
            shutil.rmtree(store)
            image.rename(store)
            cuts += 1
    for _ in range(2):
        worker = run(zygote, replace(spec, opens=1))
        assert worker.code == 0, blame(spec, worker)

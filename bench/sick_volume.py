"""One of two drives hangs, errs or crawls while both are in use: how fast the other one goes on, and when the sick one is back.

    python bench/sick_volume.py [--json FILE] [--seconds S] [--rate MBS] [--rounds N] [--directory DIR]

bench/README.md says how it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from common import Directory, measuring, one_sentence, start
from rich.table import Table
from sick_parts.drives import FAULTS, SICK, WELL, Drives
from sick_parts.users import (
    DEADLINE_S,
    GIVE_UP_S,
    PAGE_BYTES,
    PAGES,
    PROMPTS,
    THREADS,
    Users,
)

import gdsstore
from gdsstore.catalog.keys import index_keys
from gdsstore.cli.main import CANNOT_RUN
from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output
from gdsstore.engines.base import Op
from gdsstore.errors import GdsStoreError
from gdsstore.replay.truth import U8, fill_pages
from gdsstore.volume.health import Breaker

AIM = 0.9  # of its speed, for the drive that is well


def run(
    path: Path, seconds: float, rate_mbs: float, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All measurements; each on a store that was opened for it, since a drive that was sick a moment ago is trusted less."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in FAULTS}
    prompts: list[list[U8]] = [[], []]
    wrong, engine = 0, ""
    for number in range(rounds):
        for name, measured in found.items():
            say(f"round {number + 1} of {rounds}: one drive {name}")
            drives = Drives(path, rate_mbs * 1e6)
            engine = drives.engine.name
            with gdsstore.open(
                drives.paths,
                capacity="1GiB",
                segment_bytes="16MiB",
                engine=drives.engine,
                io_deadline_s=DEADLINE_S,
            ) as store:
                pages = store.namespace(model="sick-volume", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
                _save_prompts(store, pages, prompts)
                with Users(pages, prompts) as users:
                    measured.append(_measure(name, drives, store, users, seconds))
                wrong += users.wrong
    return {
        "schema": "gdsstore.bench.sick_volume",
        "schema_version": 1,
        "parameters": {
            "seconds": seconds,
            "rate_mbs": rate_mbs,
            "rounds": rounds,
            "deadline_s": DEADLINE_S,
            "page_bytes": PAGE_BYTES,
            "pages": PAGES,
            "threads": THREADS,
            "aim": AIM,
        },
        "engine": engine,
        "wrong_pages": wrong,
        "rows": [_row(name, measured) for name, measured in found.items()],
    }


def _save_prompts(store: gdsstore.Store, pages: gdsstore.BoundNamespace, prompts: list[list[U8]]) -> None:
    """Save prompts until there are enough on each drive."""
    rng = np.random.default_rng(0)
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    while min(map(len, prompts)) < PROMPTS:
        keys = rng.integers(0, 256, (PAGES, 32), np.uint8)
        fill_pages(keys, memory)
        saved = pages.save(keys, memory, deadline_s=GIVE_UP_S).result(2 * GIVE_UP_S)
        if not saved.all_ok:
            raise GdsStoreError("the pages to measure with could not be saved", **saved.reasons())
        where, rows = store.catalog.locate(*index_keys(keys, pages.digest))
        on = {rows[segment].volume for segment in np.unique(where.segment).tolist()}
        if len(on) == 1:
            prompts[on.pop()].append(keys)


def _measure(
    name: str, drives: Drives, store: gdsstore.Store, users: Users, seconds: float
) -> dict[str, Any]:
    health = store.health[Op.READ][SICK]
    time.sleep(0.3)  # engines and files are made

    def well() -> None:
        time.sleep(seconds)
        _until(
            lambda: users.loaded(WELL) > 0
        )  # on a machine that is busy with other things that takes longer

    before, before_s = users.during(well)
    drives.sickness = name
    opened_s: list[float] = []

    def sick() -> None:
        start = time.monotonic()
        while (now := time.monotonic()) < start + seconds + DEADLINE_S:
            if not opened_s and health.breaker is not Breaker.CLOSED:
                opened_s.append(now - start)
            time.sleep(0.01)

    ill, ill_s = users.during(sick)
    drives.heal()
    healed = time.monotonic()
    back, _ = users.during(lambda: _until(lambda: health.breaker is Breaker.CLOSED))
    back_s = time.monotonic() - healed
    time.sleep(0.5)  # what was late is over
    return {
        "healthy_mbs": before[WELL].nbytes / before_s / 1e6,
        "sick_mbs": ill[WELL].nbytes / ill_s / 1e6,
        "ratio": ill[WELL].nbytes / ill_s / (before[WELL].nbytes / before_s),
        "opened_s": opened_s[0] if opened_s else None,
        "back_s": back_s,
        "longest_s": max(each.longest_s for each in (*before, *ill, *back)),
        "outcomes": dict(ill[SICK].outcomes),
        "outcomes_well": dict(ill[WELL].outcomes),
    }


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + GIVE_UP_S
    while not true():
        if time.monotonic() > end:
            raise GdsStoreError("the sick drive did not come back", seconds=GIVE_UP_S)
        time.sleep(0.01)


def _row(name: str, measured: list[dict[str, Any]]) -> dict[str, Any]:
    ratio = median(each["ratio"] for each in measured)
    opened = [each["opened_s"] for each in measured if each["opened_s"] is not None]
    return {
        "sickness": name,
        "ratio": ratio,
        "meets": ratio >= AIM,
        "healthy_mbs": median(each["healthy_mbs"] for each in measured),
        "sick_mbs": median(each["sick_mbs"] for each in measured),
        "opened_s": median(opened) if opened else None,
        "back_s": max(each["back_s"] for each in measured),
        "longest_s": max(each["longest_s"] for each in measured),
        "rounds": measured,
    }


def table(result: dict[str, Any]) -> Table:
    view = Table(
        *("one drive", "the other's MB/s: before", "meanwhile", "ratio", "left alone after", "back after"),
        *("longest call", "meets"),
        title=f"A sick drive beside a well one ({result['engine']}, {result['wrong_pages']} wrong pages)",
    )
    for row in result["rows"]:
        opened = "never" if row["opened_s"] is None else f"{row['opened_s']:.2f} s"
        view.add_row(
            *(row["sickness"], f"{row['healthy_mbs']:.0f}", f"{row['sick_mbs']:.0f}", f"{row['ratio']:.2f}"),
            *(opened, f"{row['back_s']:.2f} s", f"{row['longest_s']:.2f} s", "yes" if row["meets"] else "NO"),
        )
    return view


def main(
    json: JsonFile = None,
    seconds: Annotated[float, typer.Option(help="How long each half of a measurement takes.")] = 2.0,
    rate: Annotated[float, typer.Option(help="MB/s of each drive.")] = 150.0,
    rounds: Annotated[int, typer.Option(help="Measurements of each sickness.")] = 3,
    directory: Directory = None,
    quiet: Quiet = False,
) -> None:
    """Load from two drives while one of them hangs, errs or crawls, and compare what the other one does with what it did before."""
    with one_sentence():
        output = Output(json, quiet)
        with measuring("sick-volume", output, directory) as (scratch, say):
            result = run(scratch, seconds, rate, rounds, say)
    output.show(table(result), result)
    if result["wrong_pages"]:
        raise typer.Exit(CANNOT_RUN)


if __name__ == "__main__":
    start(main)

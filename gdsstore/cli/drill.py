"""`gdsstore drill`: what a store does on this machine when things go wrong, tried out on a scratch store."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output
from gdsstore.drill.plan import DEADLINE_S, DrillFault, DrillPlan
from gdsstore.drill.report import FaultReport
from gdsstore.drill.run import drill as run_drill


class Choice(StrEnum):
    """What `--fault` may be."""

    HANG = DrillFault.HANG.value
    ERRORS = DrillFault.ERRORS.value
    CRAWL = DrillFault.CRAWL.value
    CORRUPT = DrillFault.CORRUPT.value
    FULL = DrillFault.FULL.value
    KILL = DrillFault.KILL.value
    ALL = "all"


def drill(
    directory: Annotated[
        Path | None,
        typer.Option(
            help="A directory on the drive to be tried, which no store is in; the drill works in a new folder in it. "
            "Default: here."
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            help="How long each fault lasts; what comes before and after is added.", min=0.1, max=600
        ),
    ] = 5.0,
    fault: Annotated[
        list[Choice] | None,
        typer.Option(help="What goes wrong; several times for several. Default: all."),
    ] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Let a drive hang, err, crawl, lie and be full, and kill a process, under a scratch store that is in use.

    Every loaded byte is checked. Takes up to two minutes and 1.5 GiB of disk. Exit code 1 if a fault was not gone
    through as promised, 2 if the drill could not be held.
    """
    output = Output(json, quiet)
    chosen = set(fault or [Choice.ALL])
    faults = tuple(each for each in DrillFault if chosen & {Choice(each.value), Choice.ALL})
    plan = DrillPlan((directory or Path.cwd()).absolute(), seconds, faults)
    logging.getLogger("gdsstore").setLevel(logging.CRITICAL)  # what it says of faults that were asked for
    with output.status("drill") as say:
        reports = run_drill(plan, say)
    passed = all(report.passed for report in reports)
    result = {
        "directory": str(plan.directory),
        "passed": passed,
        "deadline_s": DEADLINE_S,
        "fault_seconds": seconds,
        "faults": [report.to_dict() for report in reports],
    }
    output.show(_view(reports), result)
    if not passed:
        raise typer.Exit(1)


def _view(reports: list[FaultReport]) -> list[RenderableType]:
    table = Table(
        *("fault", "passed", "wrong pages", "late calls", "longest call", "calls", "misses", "failed saves"),
        *("left alone after", "back after", "pages lost"),
        title="drill",
        title_justify="left",
    )
    for report in reports:
        seen = report.seen
        table.add_row(
            *(report.fault.value, "yes" if report.passed else "NO", f"{seen.wrong_pages:,}"),
            *(f"{seen.late_calls:,}", f"{seen.longest_call_s:.2f} s", f"{seen.calls:,}"),
            *(f"{sum(seen.misses.values()):,}", f"{sum(seen.failed_saves.values()):,}"),
            *(_seconds(report.left_alone_s), _seconds(report.back_s), f"{report.pages_lost:,}"),
        )
    lines: list[RenderableType] = [f"{report.fault}: {what}" for report in reports for what in report.judge()]
    return [table, *lines]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"

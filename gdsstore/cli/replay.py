"""`gdsstore replay`: a trace through the store at full speed, every loaded byte checked."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output
from gdsstore.cli.replay_timed import DEFAULT_SECONDS, TimedOptions, run_timed
from gdsstore.replay.plan import ReplayPlan
from gdsstore.replay.requests import portion
from gdsstore.replay.runner import replay as run_replay
from gdsstore.sizes import parse_size

TEMPORARY_CAPACITY = "4GiB"


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Trace in Mooncake or compact agent format, plain or .gz. None: chats of our own making."
        ),
    ] = None,
    store: Annotated[
        list[Path] | None,
        typer.Option(help="Store directory; several times for several volumes. None: a temporary one here."),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            help=f"Disk that the store may use. None: what it has; a temporary one gets {TEMPORARY_CAPACITY}."
        ),
    ] = None,
    page_bytes: Annotated[
        str, typer.Option(help="Size of a page, which holds one block of the trace.")
    ] = "256KiB",
    requests: Annotated[int | None, typer.Option(help="At most so many requests. None: all.")] = None,
    skip: Annotated[
        int,
        typer.Option(
            help="Pass over so many requests first, to go on where a replay ended. With --timed, what they share with "
            "later ones is stored before."
        ),
    ] = 0,
    processes: Annotated[
        int, typer.Option(help="Worker processes that share the store, each with whole sessions.")
    ] = 1,
    faults: Annotated[
        str | None,
        typer.Option(
            help='Injected faults, as "errno:0.02,corrupt:0.01,hang:0.001"; I/O deadlines are 2 s then.'
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload of our own and of injected faults.")] = 0,
    timed: Annotated[
        bool,
        typer.Option("--timed", help="By the trace's clock, with prefill modelled as time: reports TTFT."),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help=f"With --timed: time in which the requests arrive. None: {DEFAULT_SECONDS:g}."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="With --timed: how much faster than recorded they arrive. None: so that they fit into the time."
        ),
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            help="With --timed: tokens a second that prefill computes. None: 70 % of the time is compute."
        ),
    ] = None,
    throttle: Annotated[
        float | None, typer.Option(help="With --timed: MB/s that the drive reads, and writes, at most.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --timed: picture of the TTFTs to write (.png, .svg, .pdf).")
    ] = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Replay a trace through a store and check every loaded page.

    For each request: look its pages up, load those that are there and compare them with what their keys say
    they must hold, save the rest. The result has the hit rate beside that of a plain page-LRU of the same
    capacity.

    The replay runs at full speed, not by the trace's clock, so it sets grace_s to 0: within the default of
    30 s it can cycle the whole store. Exit code 1 if a page was wrong, 2 if the replay could not run.

    With --timed, requests come by the trace's clock and prefill takes time on one modelled server: TTFT without
    a store, with one, with prefetch, and with prefetch and the cost model.
    """
    output = Output(json_file, quiet)
    timing = TimedOptions(
        seconds=seconds, scale=scale, prefill_rate=prefill_rate, throttle=throttle, plot=plot
    )
    if not timed:
        timing.check_none_given()
    with contextlib.ExitStack() as stack:
        plan = ReplayPlan(
            stores=tuple(map(str, store)) if store else (stack.enter_context(_temporary_store()),),
            capacity=_capacity(capacity, temporary=not store),
            page_bytes=parse_size(page_bytes),
            trace=None if trace is None else str(trace),
            requests=requests,
            skip=skip,
            processes=processes,
            faults=faults,
            seed=seed,
        )
        if timed:
            run_timed(plan, timing, output)
            return
        report = run_replay(plan, stack.enter_context(_progress_bar(plan, output)))
    output.show(report.to_table(), report.to_dict())
    if report.wrong_pages:
        raise typer.Exit(1)


def _capacity(capacity: str | None, *, temporary: bool) -> int | None:
    if capacity is None:
        return parse_size(TEMPORARY_CAPACITY) if temporary else None
    return parse_size(capacity)


@contextlib.contextmanager
def _temporary_store() -> Iterator[str]:
    # In the current directory, as the usual place for temporary files is often memory and not a drive.
    directory = tempfile.mkdtemp(prefix=".gdsstore-replay-", dir=".")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _progress_bar(plan: ReplayPlan, output: Output) -> Iterator[Callable[[int], None]]:
    total = sum(1 for _ in portion(plan.workload(), plan.skip, plan.requests))
    with output.counted("requests", total) as advance:
        yield advance

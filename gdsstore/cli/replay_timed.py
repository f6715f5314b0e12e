"""`gdsstore replay --timed`: the trace by its own clock, with prefill compute modelled as time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from gdsstore.cli.output import Output
from gdsstore.errors import ArgumentError
from gdsstore.replay.plan import ReplayPlan
from gdsstore.replay.timed import replay_timed
from gdsstore.replay.timed_plan import TimedPlan, Variant
from gdsstore.replay.timed_report import new_figure

DEFAULT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOptions:
    """The options of the command that count with --timed only. None: not given."""

    seconds: float | None
    scale: float | None
    prefill_rate: float | None
    throttle: float | None  # MB/s
    plot: Path | None

    def check_none_given(self) -> None:
        """Raises ArgumentError: without --timed they would do nothing."""
        names: dict[str, object] = {
            "--seconds": self.seconds,
            "--scale": self.scale,
            "--prefill-rate": self.prefill_rate,
            "--throttle": self.throttle,
            "--plot": self.plot,
        }
        given = [name for name, value in names.items() if value is not None]
        if given:
            raise ArgumentError(f"{', '.join(given)} needs --timed")


def run_timed(replay: ReplayPlan, options: TimedOptions, output: Output) -> None:
    """Replay, show the table and draw the plot. Exit code 1 if a page was wrong."""
    plan = TimedPlan(
        replay=replay,
        seconds=DEFAULT_SECONDS if options.seconds is None else options.seconds,
        scale=options.scale,
        prefill_tokens_s=options.prefill_rate,
        throttle_bytes_s=None if options.throttle is None else options.throttle * 1e6,
    )
    if options.plot is not None:
        new_figure()  # what is missing is said now, not after the replay
        if not options.plot.absolute().parent.is_dir():
            raise ArgumentError("the folder of the plot is not there", path=str(options.plot))
    with _progress_bar(plan, output) as progress:
        report = replay_timed(plan, progress)
    output.show(report.to_table(), report.to_dict())
    if options.plot is not None:
        report.plot(options.plot)
    if report.wrong_pages:
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress_bar(plan: TimedPlan, output: Output) -> Iterator[Callable[[Variant, int], None]]:
    each = len(plan.schedule().requests)
    order = list(Variant)
    with output.counted("requests", each * len(order)) as advance:
        yield lambda variant, done: advance(order.index(variant) * each + done)

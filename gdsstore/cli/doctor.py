"""`gdsstore doctor`: what works on this machine, what does not, what that costs, and what to do next."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output
from gdsstore.errors import ArgumentError, from_os_error
from gdsstore.probe.advice import Finding, IoPath, Severity, State, Verdict, exit_code, findings, verdicts
from gdsstore.probe.advice.verdicts import DIRECT_WORKS, DOES_NOT_WORK, NOT_DIRECT
from gdsstore.probe.derived import why_no_gpu
from gdsstore.probe.device_trips import ENGINES as DEVICE_ENGINES
from gdsstore.probe.device_trips import device_round_trip
from gdsstore.probe.facts import MachineFacts
from gdsstore.probe.gather import gather
from gdsstore.probe.roundtrip import ENGINES as HOST_ENGINES
from gdsstore.probe.roundtrip import round_trip
from gdsstore.probe.summary import about
from gdsstore.probe.trips import Trip
from gdsstore.sizes import MiB

STYLES = {
    State.WORKS: "green",
    State.SHOULD: "cyan",
    State.NOT_DIRECT: "yellow",
    State.DOES_NOT: "red",
    State.NOT_KNOWN: "cyan",
    Severity.BLOCKS: "red",
    Severity.MAY_BLOCK: "cyan",
    Severity.COSTS: "yellow",
    Severity.HINT: "dim",
}
MEANING = {
    IoPath.DIRECT: "drive and GPU, nothing between",
    IoPath.COMPAT: "cuFile's own fallback, through host memory",
    IoPath.BOUNCE: "the store's fallback, through pinned host memory",
    IoPath.HOST: "drive and host memory",
}

Directory = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PATH]", help="Directory that the store is or will be in. Default: the current one."
    ),
]
FactsFile = Annotated[
    Path | None,
    typer.Option(
        "--facts", metavar="FILE", help="Judge recorded facts instead of this machine; nothing is tried."
    ),
]
SaveFacts = Annotated[
    Path | None,
    typer.Option(
        "--save-facts", metavar="FILE", help="Write the facts of this machine, to judge them elsewhere."
    ),
]


def doctor(
    path: Directory = None,
    facts: FactsFile = None,
    save_facts: SaveFacts = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Tell what works between drive, host memory and GPU, what that costs where it does not, and the exact next step.

    Writes, reads back and compares 64 MiB with each engine, for host memory and for the first GPU's, in files that are
    gone afterwards. Exit code 0: bytes went direct; 1: works, but not direct, or nobody tried; 2: does not work.
    """
    output = Output(json, quiet)
    if facts is not None and path is not None:
        raise ArgumentError(
            "give a PATH or --facts, not both: recorded facts are about the path they were taken of"
        )
    directory = (path or Path.cwd()).absolute()
    if facts is None and not directory.is_dir():
        raise ArgumentError("PATH must be a directory that is there", path=str(directory))
    with output.status("looking") as say:
        found = _read(facts) if facts is not None else _tried(gather(directory), directory, say)
    if save_facts is not None:
        _save(found, save_facts)
    advice, judged = findings(found), verdicts(found)
    code = exit_code(judged)
    output.show(_view(found, judged, advice, code), _result(found, judged, advice, code))
    if code:
        raise typer.Exit(code)


def _tried(found: MachineFacts, directory: Path, say: Any) -> MachineFacts:
    """The facts, with a round trip of each engine."""
    if found.storage.writable is False:
        return found
    trips = []
    for engine in HOST_ENGINES:
        say(f"engine {engine}")
        trips.append(round_trip(engine, directory, o_direct=bool(found.storage.o_direct)))
    for engine in DEVICE_ENGINES:
        say(f"engine {engine}, with GPU memory")
        trip = device_round_trip(engine, directory, found)
        trips += [] if trip is None else [trip]
    return replace(found, round_trips=tuple(trips))


def _result(
    found: MachineFacts,
    judged: tuple[Verdict, ...],
    advice: tuple[Finding, ...],
    code: int,
) -> dict[str, Any]:
    return {
        "verdicts": [each.to_dict() for each in judged],
        "findings": [each.to_dict() for each in advice],
        "round_trips": [each.to_dict() for each in found.round_trips],
        "facts": found.to_dict(),
        "exit_code": code,
    }


def _view(
    found: MachineFacts,
    judged: tuple[Verdict, ...],
    advice: tuple[Finding, ...],
    code: int,
) -> list[RenderableType]:
    parts: list[RenderableType] = [_machine(found), _verdicts(judged)]
    if found.round_trips:
        parts += [
            _measured(found.round_trips),
            Text("Written, read back and compared. No benchmark: see `gdsstore bench host`."),
        ]
        no_gpu = why_no_gpu(found)
        parts += [] if no_gpu is None else [Text(f"With GPU memory nothing was tried. {no_gpu}")]
    for each in advice:
        parts += ["", _finding(each)]
    summary = {
        DIRECT_WORKS: "The direct path works: bytes went between drive and GPU while cuFile was not allowed to fall back.",
        NOT_DIRECT: "A store works here, but bytes do not go straight between drive and GPU, or nobody tried.",
        DOES_NOT_WORK: "A store does not work here.",
    }
    style = {DIRECT_WORKS: "bold green", NOT_DIRECT: "bold yellow", DOES_NOT_WORK: "bold red"}
    first = next((each for each in advice if each.severity in (Severity.BLOCKS, Severity.MAY_BLOCK)), None)
    parts += ["", Text(summary[code], style=style[code])]
    if first is not None and code:
        parts.append(Text(f"First step: {first.next_step}"))
    return parts


def _machine(found: MachineFacts) -> Table:
    table = Table(title="this machine", show_header=False, title_justify="left")
    for name, value in about(found):
        table.add_row(name, Text(value))
    for note in found.notes:
        table.add_row("could not be read", Text(note))
    return table


def _verdicts(judged: tuple[Verdict, ...]) -> Table:
    table = Table(title="paths", title_justify="left")
    for column in ("path", "verdict", "why"):
        table.add_column(column, overflow="fold")
    for each in judged:
        name = Group(Text(each.path.value, style="bold"), Text(MEANING[each.path], style="dim"))
        table.add_row(name, Text(each.state.value, style=STYLES[each.state]), Text(each.reason))
    return table


def _measured(trips: tuple[Trip, ...]) -> Table:
    table = Table(title="round trip (a glimpse)", title_justify="left")
    table.add_column("engine")
    table.add_column("path", overflow="fold")
    table.add_column("result", overflow="fold")
    for column in ("MiB", "write GB/s", "read GB/s"):
        table.add_column(column, justify="right")
    for each in trips:
        text = each.outcome.value if each.detail is None else f"{each.outcome.value}: {each.detail}"
        good = each.works and (each.device is None or each.path is IoPath.DIRECT)
        table.add_row(
            each.engine if each.device is None else f"{each.engine}, GPU {each.device}",
            _path(each),
            Text(
                text + (" (page cache)" if each.works and not each.o_direct else ""),
                style="green" if good else "yellow" if each.works else "red",
            ),
            f"{each.nbytes // MiB}" if each.nbytes else "",
            _speed(each.write_gbps),
            _speed(each.read_gbps),
        )
    return table


def _path(trip: Trip) -> Text:
    """The path of a round trip, with what the engine counted where that were several."""
    counted = [(each.direct, each.compat, each.bounce) for each in (trip.written, trip.read) if each]
    sums = {path: sum(each) for path, each in zip(IoPath, zip(*counted, strict=True), strict=False)}
    several = [f"{path.value} {nbytes // MiB}" for path, nbytes in sums.items() if nbytes]
    if len(several) > 1:
        return Text(f"{', '.join(several)} MiB")
    return Text("" if trip.path is None else trip.path.value)


def _finding(each: Finding) -> Text:
    text = Text()
    text.append(f"{each.severity.value}: {each.path.value}", style=STYLES[each.severity])
    text.append(f"  {each.title}\n", style="bold")
    text.append(f"  What it costs: {each.cost}\n")
    text.append("  What to do:    ")
    text.append(each.next_step, style="green" if each.severity is not Severity.HINT else "")
    if each.see:
        text.append(f"\n  See: {', '.join(each.see)}", style="dim")
    return text


def _speed(gbps: float | None) -> str:
    return "" if gbps is None else f"{gbps:.2f}"


def _read(file: Path) -> MachineFacts:
    try:
        data = json_module.loads(file.read_text())
    except OSError as error:
        raise from_os_error(error, "cannot read the facts", ArgumentError) from error
    except ValueError as error:
        raise ArgumentError(f"the facts are not JSON: {error}", path=str(file)) from error
    if isinstance(data, dict) and isinstance(data.get("facts"), dict):
        data = data["facts"]  # the result of `doctor --json` has them inside
    return MachineFacts.from_dict(data)


def _save(found: MachineFacts, file: Path) -> None:
    try:
        file.write_text(json_module.dumps(found.to_dict(), indent=1) + "\n")
    except OSError as error:
        raise from_os_error(error, "cannot write the facts", ArgumentError) from error

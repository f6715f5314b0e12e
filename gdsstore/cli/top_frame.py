"""One frame of `gdsstore top`: a status document as lines that fit a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gdsstore.cli.top_units import percent, size, span, speed

Document = dict[str, Any]

WINDOW_S = 10.0  # over which rates are taken
PIPE_WIDTH, FULL_HEIGHT = 200, 40  # where the frame does not go to a terminal
FIXED_LINES = 16  # of a frame: all but the drives, processes, namespaces and errors
HEALTH = {"healthy": "green", "slow": "yellow", "sick": "red"}


def frame(
    document: Document,
    older: Sequence[Document],
    *,
    width: int = PIPE_WIDTH,
    height: int = FULL_HEIGHT,
    problem: str | None = None,
) -> Group:
    """What to show of a document, in at most `width` x `height` characters (80 x 24 is the least). `older`: some from before it,
    for rates. `problem`: why there is no newer document."""
    since = _since(document, older)
    drives, clients, namespaces, errors = _shares(document, height)
    return Group(
        _head(document, problem),
        _space(document),
        _beside(_throughput(document, since), _queues(document)),
        _beside(_hits(document, since), _latencies(document, since)),
        _drives(document["drives"][:drives], width - 54),
        *_clients(document["clients"], clients, width - 44),
        _segments(document["segments"]),
        _namespaces(document["namespaces"], namespaces, width - 30),
        *_errors(document["errors"][:errors]),
    )


def _shares(document: Document, height: int) -> list[int]:
    """How many lines drives, processes, namespaces and errors get: in turn one each, while there are lines and rows."""
    wanted = [
        len(document["drives"]),
        len(document["clients"]),
        len(document["namespaces"]["rows"]),
        max(1, len(document["errors"])),
    ]
    given = [0] * len(wanted)
    left = height - FIXED_LINES - bool(document["clients"])  # their head
    while left > 0 and given != wanted:
        for i in range(len(wanted)):
            if given[i] < wanted[i] and left > 0:
                given[i] += 1
                left -= 1
    return given


def _since(document: Document, older: Sequence[Document]) -> Document | None:
    """The newest document of the same run that is older than the window, or its oldest."""
    run = [each for each in older if _run(each) == _run(document) and each["clock_s"] < document["clock_s"]]
    old = [each for each in run if document["clock_s"] - each["clock_s"] >= WINDOW_S]
    return old[-1] if old else run[0] if run else None


def _run(document: Document) -> tuple[Any, Any]:
    return document["store"]["uuid"], (document["daemon"] or {}).get("pid")


# --- parts ---


def _table(*columns: str, left: frozenset[str] = frozenset()) -> Table:
    """A table without lines; the first column, and those in `left`, to the left. No cell takes a second line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(
            name,
            justify="left" if number == 0 or name in left else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def _beside(first: Table, second: Table) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=39)
    grid.add_column()
    grid.add_row(first, second)
    return grid


def _head(document: Document, problem: str | None) -> Text:
    daemon = document["daemon"]
    head = Text("gdsstore  ", no_wrap=True, overflow="ellipsis")
    if problem is not None:
        head.append(problem, "bold red")
    elif daemon is None:
        head.append("no daemon: only what the store's files tell", "yellow")
    else:
        head.append(*(("draining", "yellow") if daemon.get("draining") else ("live", "green")))
        head.append(f", process {daemon.get('pid')}, up {span(daemon.get('uptime_s'))}")
        head.append(f", {daemon.get('clients', 0)} clients, {daemon.get('leases', 0)} leases")
    return head.append(f"  {document['store']['path']}", "dim")


def _space(document: Document) -> Text:
    store, cache = document["store"], document["host_cache"]
    parts = [
        f"disk {size(store['physical_bytes'])} of {size(store['capacity_bytes'])}",
        f"{store['pages']:,} pages",
    ]
    if cache is not None:
        parts.append(f"host cache {size(cache['resident_bytes'])} of {size(cache['size_bytes'])}")
    return Text("   ".join(parts) + "\n", no_wrap=True, overflow="ellipsis")


def _throughput(document: Document, since: Document | None) -> Table:
    table = _table("throughput", "now", "in all")
    moved, before = _moved(document), _moved(since) if since else Counter()
    for name, nbytes in sorted(moved.items(), key=lambda row: (-row[1], row[0]))[:4]:
        now = None if since is None else (nbytes - before[name]) / (document["clock_s"] - since["clock_s"])
        table.add_row(name, speed(now), size(nbytes))
    if not moved:
        table.add_row("nothing moved", "", "")
    return table


def _moved(document: Document) -> Counter[str]:
    moved: Counter[str] = Counter()
    for row in document["throughput"]:
        moved[f"{row['direction']} {row['path']}"] += row["bytes"]
    return moved


def _queues(document: Document) -> Table:
    table = _table("queue", "waiting", "oldest", "dropped")
    for queue in document["queues"]:
        lost = queue["dropped"] + queue["expired"] + queue["refused"]
        table.add_row(queue["class"], f"{queue['waiting']:,}", span(queue["oldest_s"]), f"{lost:,}")
    return table


def _hits(document: Document, since: Document | None) -> Table:
    table = _table("hit rate", "now", "in all", "hits")
    before = {tier["tier"]: tier for tier in since["tiers"]} if since else {}
    for tier in document["tiers"]:
        old = before.get(tier["tier"])
        now = None if old is None else _rate(tier, old)
        table.add_row(tier["tier"], percent(now), percent(_rate(tier, None)), f"{tier['hits']:,}")
    return table


def _rate(tier: Document, before: Document | None) -> float | None:
    hits, asked = tier["hits"], tier["hits"] + sum(tier["misses"].values())
    if before is not None:
        hits -= before["hits"]
        asked -= before["hits"] + sum(before["misses"].values())
    return hits / asked if asked > 0 else None


def _latencies(document: Document, since: Document | None) -> Table:
    table = _table("latency of a chunk", "median", "p99")
    bounds = document["latencies"]["bounds_s"]
    for direction in ("read", "write"):
        counts = _chunks(document, direction)
        if since is not None:
            counts = [now - old for now, old in zip(counts, _chunks(since, direction), strict=True)]
        table.add_row(direction, *(span(_quantile(bounds, counts, share)) for share in (0.5, 0.99)))
    return table


def _chunks(document: Document, direction: str) -> list[int]:
    rows = [
        row["counts"]
        for row in document["latencies"]["rows"]
        if (row["what"], row["of"]) == ("chunk", direction)
    ]
    return [sum(counts) for counts in zip(*rows, strict=True)]


def _quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The upper end of the bucket that the share falls into; the last one has none, and its lower end is told."""
    wanted, below = share * sum(counts), 0
    if wanted == 0:
        return None
    for bound, inside in zip([*bounds, bounds[-1]], counts, strict=True):
        below += inside
        if below >= wanted:
            return bound
    return None


def _drives(drives: Sequence[Document], path_width: int) -> Table:
    table = _table("drive", "health", "free", "read/MiB", "write/MiB", "errors", left=frozenset({"health"}))
    for drive in drives:
        errors = drive["read"]["errors"] + drive["write"]["errors"]
        path = drive["path"]
        table.add_row(
            Text(path if len(path) <= path_width else f"…{path[1 - path_width :]}"),
            Text(drive["health"], HEALTH[drive["health"]]),
            size(drive["free_bytes"]),
            span(drive["read"]["seconds_a_mib"]),
            span(drive["write"]["seconds_a_mib"]),
            f"{errors:,}",
        )
    return table


def _clients(clients: Sequence[Document], lines: int, name_width: int) -> list[Table]:
    hidden = len(clients) - lines
    table = _table(
        f"process ({hidden:,} more)" if hidden else "process", "read", "written", "leases", "here for"
    )
    for each in clients[:lines]:
        row = (size(each["read_bytes"]), size(each["written_bytes"]), f"{each['leases']:,}")
        name = Text(f"{each['pid']} {each['name']}", overflow="ellipsis")
        name.truncate(name_width)
        table.add_row(name, *row, span(each["connected_s"]))
    return [table] if clients else []


def _segments(segments: Document) -> Text:
    states = ", ".join(f"{count:,} {state}" for state, count in segments["states"].items() if count)
    return Text(f"segments  {states or 'none'}", no_wrap=True, overflow="ellipsis")


def _namespaces(namespaces: Document, lines: int, name_width: int) -> Table:
    hidden = namespaces["count"] - min(lines, len(namespaces["rows"]))
    table = _table(f"namespace ({hidden:,} more)" if hidden else "namespace", "pages", "on the drives")
    for each in namespaces["rows"][:lines]:
        name = Text(each["name"], overflow="ellipsis")
        name.truncate(name_width)
        table.add_row(name, f"{each['pages']:,}", size(each["bytes"]))
    return table


def _errors(errors: Sequence[Document]) -> list[Text]:
    shown = [Text("last errors", "dim", no_wrap=True)]
    for each in errors:
        at = time.strftime("%H:%M:%S", time.localtime(each["time_s"]))
        times = f" ({each['count']} times)" if each["count"] > 1 else ""
        style = "yellow" if each["level"] == "warning" else "red"
        shown.append(
            Text.assemble(
                f"{at} ",
                (each["level"], style),
                f" {each['message']}{times}",
                no_wrap=True,
                overflow="ellipsis",
            )
        )
    if not errors:
        shown.append(Text("none"))
    return shown

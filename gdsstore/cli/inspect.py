"""`gdsstore inspect`: what a store holds, and where."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gdsstore.cli.options import JsonFile, Quiet, StoreDirs, open_existing
from gdsstore.cli.output import Output
from gdsstore.cli.survey import HotPage, NamespaceInfo, SegmentInfo, Survey, VolumeInfo, survey

Segments = Annotated[bool, typer.Option("--segments", help="List every segment.")]
KeyCount = Annotated[
    int, typer.Option("--keys", metavar="N", min=0, help="How many of the hottest pages to list.")
]


def inspect(
    store: StoreDirs,
    segments: Segments = False,
    keys: KeyCount = 10,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Show volumes, segments by state with fill and heat, namespaces, and the hottest pages.

    The store may be in use. An age is the time since a page was last looked up, loaded or saved; a segment's is that by
    which reclaim chooses.
    """
    output = Output(json, quiet)
    with output.status("looking"), open_existing(store) as opened:
        found = survey(opened, keys)
    output.show(_view(found, segments), found.to_dict(with_segments=segments))


def _view(found: Survey, segments: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [
        _store(found),
        _volumes(found.volumes),
        _states(found),
        _namespaces(found.namespaces),
    ]
    if segments:
        parts.append(_segments(found.segments))
    if found.hottest:
        parts.append(_hottest(found.hottest))
    return parts


def _table(title: str, *columns: str, numbers: frozenset[str] = frozenset()) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def _store(found: Survey) -> Table:
    store = found.store
    table = Table(title=Text(f"store {store['path']}"), show_header=False, title_justify="left")
    share = store["physical_bytes"] / store["capacity_bytes"]
    table.add_row("disk", f"{_gb(store['physical_bytes'])} of {_gb(store['capacity_bytes'])} ({share:.0%})")
    table.add_row("  catalog, heat", f"{_mib(store['catalog_bytes'])}, {_mib(store['heat_bytes'])}")
    table.add_row("pages", f"{store['pages']:,}")
    table.add_row("catalog used", store["opened"])
    return table


def _volumes(volumes: list[VolumeInfo]) -> Table:
    table = _table("volumes", "path", "free", "of", "segments", "take", "direct I/O")
    for each in volumes:
        direct = (
            f"yes, memory aligned to {each.memory_alignment}" if each.direct else "no: through the page cache"
        )
        table.add_row(
            Text(each.path),
            _gb(each.free_bytes),
            _gb(each.total_bytes),
            f"{each.segments:,}",
            _gb(each.segment_file_bytes),
            direct,
        )
    return table


def _states(found: Survey) -> Table:
    table = _table("segments", "state", "segments", "pages", "fill", "age, hottest", "age, coldest")
    for state, each in found.states.items():
        fill = "" if each["fill"] is None else f"{each['fill']:.0%}"
        hottest, coldest = (
            _age(each[name]) if each["pages"] else "" for name in ("hottest_age_s", "coldest_age_s")
        )
        table.add_row(state, f"{each['segments']:,}", f"{each['pages']:,}", fill, hottest, coldest)
    return table


def _namespaces(namespaces: list[NamespaceInfo]) -> Table:
    table = _table("namespaces", "namespace", "pages", "payload", "model", "pool", "layout", "rank")
    for each in namespaces:
        said = each.describes or {}
        table.add_row(
            each.namespace,
            f"{each.pages:,}",
            _gb(each.payload_bytes),
            Text(str(said.get("model", "description lost"))),
            Text(str(said.get("pool", ""))),
            Text(_facts(said.get("layout"))),
            Text(_rank(said.get("parallelism"))),
        )
    return table


def _facts(layout: object) -> str:
    return (
        " ".join(f"{name}={value}" for name, value in layout.items() if value)
        if isinstance(layout, dict)
        else ""
    )


def _rank(parallelism: object) -> str:
    if not isinstance(parallelism, dict):
        return ""
    axes = [
        name[: -len("_size")] for name, size in parallelism.items() if name.endswith("_size") and size != 1
    ]
    return " ".join(
        f"{axis} {parallelism.get(f'{axis}_rank')}/{parallelism[f'{axis}_size']}" for axis in axes
    )


def _segments(segments: list[SegmentInfo]) -> Table:
    table = _table("every segment", "file", "state", "slot", "filled", "pages", "age", "hottest page")
    for each in segments:
        table.add_row(
            Text(each.file),
            each.state,
            f"{each.slot_bytes >> 10} KiB" if each.slots else "",
            f"{each.filled:,} of {each.slots:,}" if each.slots else "",
            f"{each.pages:,}",
            _age(each.age_s) if each.pages else "",
            _age(each.youngest_s) if each.pages else "",
        )
    return table


def _hottest(pages: list[HotPage]) -> Table:
    table = _table("hottest pages", "key", "namespace", "file", "slot", "bytes", "age")
    for each in pages:
        key = each.key or "not in the table"
        table.add_row(
            key, each.namespace, Text(each.file), str(each.slot), f"{each.payload_bytes:,}", _age(each.age_s)
        )
    return table


def _age(seconds: float | None) -> str:
    """A rough age, for people."""
    if seconds is None or seconds > 365 * 86400:
        return "never used"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"

"""The report: one HTML page that needs nothing beside it, its plots as PNG files, the numbers as JSON, and a terminal's tables."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from gds_parts.looks import paths_label, size_label
from gds_parts.plots import draw
from gds_parts.rounds import Missing
from gds_parts.rows import LOSES, Row, Verdict
from gds_parts.run import NOTES, Measured
from gdsstore.errors import ArgumentError, from_os_error

REPORT, NUMBERS = "report.html", "gds_vs_bounce.json"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
.unreal { color: #c00000; border: 2px solid #c00000; padding: .5em .8em }
img { max-width: 100%; display: block; margin: 1em 0 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums } tr.loses td { background: #fde8e8; font-weight: 600 }
"""
_ROW_HEADS = (
    *("record", "in flight", "direction", "contender", "memory", "GB/s", "p50 ms", "p99 ms", "CPU-s/GB"),
    *("DRAM bytes/byte", "path, as counted"),
)
_VERDICT_HEADS = (
    *(
        "record",
        "in flight",
        "direction",
        "direct path",
        "GB/s by",
        "the best other way",
        "into host memory",
        "direct",
    ),
)


def write_report(out: Path, measured: Measured) -> None:
    """Into the folder `out`, over what is there by these names. Raises ArgumentError where it cannot be written."""
    images = draw(measured)
    page = _page(measured, images)
    numbers = json.dumps(measured.to_dict(), indent=1, allow_nan=False) + "\n"
    try:
        for name, image in images.items():
            (out / name).write_bytes(image)
        (out / REPORT).write_text(page, encoding="utf-8")
        (out / NUMBERS).write_text(numbers)
    except OSError as error:
        raise from_os_error(error, "cannot write the report", ArgumentError) from error


def tables(measured: Measured, out: Path) -> list[RenderableType]:
    shown = Table(*_ROW_HEADS[:-2], _ROW_HEADS[-1], title=measured.title)
    for row in measured.rows:
        cells = _row_cells(row)
        shown.add_row(*cells[:-2], cells[-1])
    told = [f"missing: {text}" for text in map(_missing_text, measured.missing)]
    return [shown, _summary(measured), *told, f"report: {out / REPORT}"]


def _page(measured: Measured, images: dict[str, bytes]) -> str:
    title = escape(measured.title)
    unreal = "" if measured.gpu.kind == "real" else ' class="unreal"'
    about = [
        ("date", measured.date),
        *measured.machine.lines(),
        ("DRAM counter", measured.dram or f"none: {measured.no_dram}"),
    ]
    if measured.gpu.why:
        about.insert(0, ("GPU of this run", measured.gpu.why))
    parts = [
        f"<h1{unreal}>{title}</h1>",
        f"<p><b>{escape(_summary(measured))}</b></p>",
        "<h2>Where the direct path wins and loses</h2>",
        _image("verdicts.png", images),
        _table(_VERDICT_HEADS, [(_verdict_cells(v), v.outcome == LOSES) for v in measured.verdicts]),
        "<h2>Plots</h2>",
        *(_image(name, images) for name in images if name != "verdicts.png"),
        "<h2>Not measured</h2>",
        _list(map(_missing_text, measured.missing)) if measured.missing else "<p>Nothing is missing.</p>",
        "<h2>The machine</h2>",
        _table(("", ""), [((name, value), False) for name, value in about]),
        "<h2>How it was measured</h2>",
        _list(NOTES),
        "<h2>All rows</h2>",
        _table(_ROW_HEADS, [(_row_cells(row), False) for row in measured.rows]),
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _summary(measured: Measured) -> str:
    """In one sentence, where the direct path loses and by how much."""
    found = measured.verdicts
    compared = [verdict for verdict in found if verdict.ratio is not None]
    lost = [verdict for verdict in compared if verdict.outcome == LOSES]
    if not compared:
        return "The direct path was not compared: see what was not measured, and the rows' paths."
    rest = len(found) - len(compared)
    others = f" In {rest} more, no direct path was measured, or nothing beside it." if rest else ""
    if not lost:
        return f"The direct path loses in none of {len(compared)} cells.{others}"
    worst = min(lost, key=lambda verdict: verdict.ratio or 0.0)
    return (
        f"The direct path loses in {len(lost)} of {len(compared)} cells; worst at {worst.direction}, "
        f"{size_label(worst.record_bytes)}, {worst.submitters} in flight: {worst.ratio:.2f} of {worst.rival}'s GB/s.{others}"
    )


def _missing_text(each: Missing) -> str:
    where = "" if each.submitters is None else f", {each.submitters} in flight"
    cell = f", from {each.cell} on" if each.cell else ""
    return f"{each.contender}{where}{cell}: {each.reason}"


def _row_cells(row: Row) -> tuple[str, ...]:
    return (
        size_label(row.record_bytes),
        str(row.submitters),
        row.direction,
        row.contender,
        row.memory,
        f"{row.gbps:.2f}",
        _number(row.latency_p50_us, 1e-3, 3),
        _number(row.latency_p99_us, 1e-3, 3),
        _number(row.cpu_s_per_gb, 1.0, 3),
        _number(row.dram_bytes_per_byte, 1.0, 2),
        paths_label(row.paths),
    )


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    by = "" if verdict.rival is None else f"{verdict.rival}"
    host = "" if verdict.host is None else f"{_number(verdict.ratio_to_host, 1.0, 2)} of {verdict.host}"
    return (
        size_label(verdict.record_bytes),
        str(verdict.submitters),
        verdict.direction,
        verdict.direct or "",
        _number(verdict.ratio, 1.0, 2),
        by,
        host,
        verdict.outcome,
    )


def _number(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}"


def _image(name: str, images: dict[str, bytes]) -> str:
    data = base64.b64encode(images[name]).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _table(heads: tuple[str, ...], rows: list[tuple[tuple[str, ...], bool]]) -> str:
    def line(cells: tuple[str, ...], marked: bool) -> str:
        return f"<tr{' class=loses' if marked else ''}>" + "".join(_td(cell) for cell in cells) + "</tr>"

    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    return f"<table><tr>{top}</tr>" + "".join(line(*row) for row in rows) + "</table>"


def _td(text: str) -> str:
    number = text.replace(".", "", 1).isdigit()
    return f"<td{' class=n' if number else ''}>{escape(text)}</td>"

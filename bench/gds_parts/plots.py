"""The plots, drawn with matplotlib, which only this file imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from gds_parts.heatmap import draw_verdicts
from gds_parts.lineup import ASKED_TO_BE_DIRECT
from gds_parts.looks import label_of, look_of, size_label
from gds_parts.rows import LOSES, Row, Verdict
from gds_parts.run import Measured
from gdsstore.errors import MissingExtraError

PANEL_INCHES = (3.4, 2.9)
DPI = 110
DIRECTIONS = ("read", "write")
LOSES_COLOR = "#c00000"

Value = Callable[[Row], float | None]


def need_matplotlib() -> None:
    """Raises MissingExtraError, which says how to install it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench", "the report")


def draw(measured: Measured) -> dict[str, bytes]:
    """PNG images by file name."""
    rows, verdicts = measured.rows, measured.verdicts
    figures = {
        "throughput.png": _panels(measured, "Throughput", "GB/s", lambda row: row.gbps, marks=verdicts),
        "latency.png": _panels(
            measured,
            "Latency of a plan of as many records as submitters (point: p50, line up to p99)",
            "ms",
            lambda row: _ms(row.latency_p50_us),
            upper=lambda row: _ms(row.latency_p99_us),
            log=True,
        ),
        "cpu.png": _panels(
            measured, "CPU time of the process", "CPU-s / GB", lambda row: row.cpu_s_per_gb, log=True
        ),
    }
    if any(row.dram_bytes_per_byte is not None for row in rows):
        figures["dram.png"] = _panels(
            measured,
            "Traffic of the host's DRAM, whole machine",
            "bytes / byte moved",
            lambda row: row.dram_bytes_per_byte,
        )
    color = _heading_color(measured)
    figures["verdicts.png"] = draw_verdicts(_figure, measured.sizes, verdicts, measured.title, color)
    return {name: _png(figure) for name, figure in figures.items()}


def _panels(
    measured: Measured,
    what: str,
    unit: str,
    value: Value,
    *,
    upper: Value | None = None,
    log: bool = False,
    marks: Sequence[Verdict] = (),
) -> Any:
    """A row of panels for each direction, one for each number of submitters; record sizes from left to right."""
    sizes = measured.sizes
    columns = len(sizes.submitters)
    figure = _figure(max(8.0, PANEL_INCHES[0] * columns), PANEL_INCHES[1] * len(DIRECTIONS) + 1.4)
    grid = figure.subplots(len(DIRECTIONS), columns, sharex=True, sharey="row", squeeze=False)
    names = list(dict.fromkeys(row.contender for row in measured.rows))
    handles: dict[str, Any] = {}
    for direction, panels in zip(DIRECTIONS, grid, strict=True):
        for submitters, axes in zip(sizes.submitters, panels, strict=True):
            here = [r for r in measured.rows if (r.direction, r.submitters) == (direction, submitters)]
            handles |= _lines(axes, sizes.records, names, here, value, upper)
            lost = [
                v for v in marks if (v.direction, v.submitters, v.outcome) == (direction, submitters, LOSES)
            ]
            handles |= _rings(axes, sizes.records, lost, here)
            _dress(axes, sizes.records, log)
            axes.set_title(f"{direction}, {submitters} in flight", fontsize=10)
        panels[0].set_ylabel(unit)
        if not log:
            panels[0].set_ylim(bottom=0)  # of the whole row, and only now: it ends the fitting of the top
    for axes in grid[-1]:
        axes.set_xlabel("record size")
    figure.suptitle(f"{measured.title}\n{what}", fontsize=11, color=_heading_color(measured))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )
    return figure


def _lines(
    axes: Any,
    records: Sequence[int],
    names: Sequence[str],
    rows: Sequence[Row],
    value: Value,
    upper: Value | None,
) -> dict[str, Any]:
    handles = {}
    for at, name in enumerate(names):
        # Side by side where lines up to p99 would hide each other.
        shift = 0.0 if upper is None else (at - (len(names) - 1) / 2) * 0.7 / len(names)
        mine = {row.record_bytes: row for row in rows if row.contender == name}
        points = [
            (i + shift, value(mine[size]), mine[size]) for i, size in enumerate(records) if size in mine
        ]
        known = [(x, y, row) for x, y, row in points if y is not None]
        if not known:
            continue
        look = look_of(name)
        x, y = [each[0] for each in known], [each[1] for each in known]
        (line,) = axes.plot(x, y, **(look if upper is None else {**look, "linestyle": "none"}))
        if upper is not None:
            tops = [upper(row) or y_ for _, y_, row in known]
            axes.vlines(x, y, tops, color=look["color"], linewidth=1.2)
        handles[label_of(name)] = line
        fell = [(x_, y_) for x_, y_, row in known if name in ASKED_TO_BE_DIRECT and not row.is_direct]
        if fell:
            style = {"linestyle": "none", "marker": "o", "markersize": 3, "color": "white", "zorder": 4}
            axes.plot([x_ for x_, _ in fell], [y_ for _, y_ in fell], **style)
            edge = {"markeredgecolor": "black"}  # on white paper, only the legend's needs one
            (handles["asked to be direct, and was not"],) = axes.plot([], [], **style, **edge)
    return handles


def _rings(axes: Any, records: Sequence[int], lost: Sequence[Verdict], rows: Sequence[Row]) -> dict[str, Any]:
    """Rings around the direct path's points that lose."""
    at = {(row.contender, row.record_bytes): row.gbps for row in rows}
    points = [(records.index(v.record_bytes), at[str(v.direct), v.record_bytes]) for v in lost]
    if not points:
        return {}
    ring = axes.scatter(
        [x for x, _ in points],
        [y for _, y in points],
        s=150,
        facecolors="none",
        edgecolors=LOSES_COLOR,
        linewidths=1.6,
        zorder=5,
    )
    return {"direct loses": ring}


def _dress(axes: Any, records: Sequence[int], log: bool) -> None:
    axes.set_xticks(range(len(records)), [size_label(size) for size in records], fontsize=8)
    axes.set_xlim(-0.5, len(records) - 0.5)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", which="both" if log else "major", alpha=0.25)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)


def _plain(value: float, _position: int) -> str:
    return f"{value:g}"


def _heading_color(measured: Measured) -> str:
    return LOSES_COLOR if measured.gpu.kind != "real" else "black"


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _png(figure: Any) -> bytes:
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()

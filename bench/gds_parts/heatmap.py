"""The map of where the direct path wins and loses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gds_parts.looks import size_label
from gds_parts.rows import LOSES, NO_DIRECT, NO_RIVAL, Verdict
from gds_parts.sizes import Sizes

LOSES_COLOR = "#c00000"
FACTOR_AT_END = 2.0  # of the colours: direct twice as fast, or half as fast


def draw_verdicts(
    figure_of: Callable[[float, float], Any],
    sizes: Sizes,
    verdicts: Sequence[Verdict],
    heading: str,
    heading_color: str,
) -> Any:
    """For each direction, record size by submitters: GB/s of the best direct path by the best other way into device memory."""
    columns, lines = len(sizes.submitters), len(sizes.records)
    figure = figure_of(max(8.0, 2 * (1.2 * columns + 1.4)), max(3.4, 0.62 * lines + 2.2))
    panels = figure.subplots(1, 2, squeeze=False)[0]
    for direction, axes in zip(("read", "write"), panels, strict=True):
        axes.set_title(direction, fontsize=10)
        axes.set_xticks(range(columns), [str(each) for each in sizes.submitters])
        axes.set_yticks(range(lines), [size_label(size) for size in sizes.records])
        axes.set_xlim(-0.5, columns - 0.5)
        axes.set_ylim(lines - 0.5, -0.5)
        axes.set_xlabel("records in flight")
        for verdict in verdicts:
            if verdict.direction == direction:
                x, y = sizes.submitters.index(verdict.submitters), sizes.records.index(verdict.record_bytes)
                _cell(axes, x, y, verdict)
    panels[0].set_ylabel("record size")
    figure.suptitle(
        f"{heading}\nDirect path by the best other way into device memory, GB/s by GB/s",
        fontsize=11,
        color=heading_color,
    )
    return figure


def _cell(axes: Any, x: int, y: int, verdict: Verdict) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    if verdict.ratio is None:
        color: Any = "#e8e8e8"
        text = {NO_DIRECT: "no direct\npath", NO_RIVAL: "no other\npath"}.get(verdict.outcome, "")
    else:
        ratio = min(max(verdict.ratio, 1 / FACTOR_AT_END), FACTOR_AT_END)
        color = colormaps["PuOr"](0.15 + 0.7 * float(LogNorm(1 / FACTOR_AT_END, FACTOR_AT_END)(ratio)))
        text = f"{verdict.ratio:.2f}\n{verdict.outcome}"
    loses = verdict.outcome == LOSES
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white"))
    if loses:
        edge = Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, fill=False, edgecolor=LOSES_COLOR, linewidth=2)
        axes.add_patch(edge)
    axes.text(x, y, text, ha="center", va="center", fontsize=8, fontweight="bold" if loses else "normal")

"""How contenders look in plots, and sizes and paths in words. Colours that colour-blind people can tell apart (Okabe and Ito)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gds_parts.lineup import BOUNCE_NIXL, BOUNCE_POSIX, KVIKIO_COMPAT, KVIKIO_DIRECT, NIXL, NIXL_GDS_MT, POSIX
from gds_parts.reference import FIO, GDSIO_BOUNCE, GDSIO_DIRECT
from gdsstore.sizes import KiB, MiB

_SOLID, _DASHED, _DOTTED, _NONE = "-", "--", ":", "none"
_LOOKS: dict[str, tuple[str, str, str]] = {  # colour, line, marker
    KVIKIO_DIRECT: ("#0072B2", _SOLID, "o"),
    NIXL_GDS_MT: ("#56B4E9", _SOLID, "s"),
    BOUNCE_NIXL: ("#D55E00", _DASHED, "^"),
    BOUNCE_POSIX: ("#E69F00", _DASHED, "v"),
    KVIKIO_COMPAT: ("#CC79A7", _DASHED, "D"),
    NIXL: ("#009E73", _DOTTED, "P"),
    POSIX: ("#7a7a00", _DOTTED, "X"),
    FIO: ("black", _NONE, "+"),
    GDSIO_DIRECT: ("black", _NONE, "x"),
    GDSIO_BOUNCE: ("black", _NONE, "1"),
}
_INTO = {NIXL: "host memory", POSIX: "host memory", FIO: "host memory, reference"}
_INTO |= {GDSIO_DIRECT: "reference", GDSIO_BOUNCE: "reference"}


def look_of(contender: str) -> dict[str, Any]:
    """Arguments of matplotlib's `plot`."""
    color, line, marker = _LOOKS[contender]
    return {"color": color, "linestyle": line, "marker": marker, "markersize": 5.5, "linewidth": 1.4}


def label_of(contender: str) -> str:
    return f"{contender} ({_INTO[contender]})" if contender in _INTO else contender


def size_label(nbytes: int) -> str:
    return f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"


def paths_label(paths: Mapping[str, float]) -> str:
    """Shares by path, the largest first."""
    ordered = sorted(paths.items(), key=lambda item: -item[1])
    return (
        ", ".join(path if share == 1.0 else f"{path} {share:.1%}" for path, share in ordered)
        or "nothing moved"
    )

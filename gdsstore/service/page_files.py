"""The files of the live page: a fixed handful, read once, so that no request ever names a file on the disk."""

from __future__ import annotations

from importlib import resources

TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "segments.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "units.js": "text/javascript; charset=utf-8",
    "rates.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uPlot.LICENSE": "text/plain; charset=utf-8",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Content and media type by path; `/` is the page itself."""
    folder = resources.files("gdsstore.service") / "page"
    files = {f"/{name}": ((folder / name).read_bytes(), kind) for name, kind in TYPES.items()}
    files["/"] = files.pop("/index.html")
    return files

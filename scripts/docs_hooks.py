"""Hooks for mkdocs.yml: pages that lie beside the code are part of the site, and links between them and docs/ lead there.

In the repository every link is relative to the file that it stands in, so that it works where the files are read. The site has
docs/ at its root and the other pages below repo/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BESIDE = "repo/"
PAGES = (
    "CHANGELOG.md",
    "README.md",
    "SECURITY.md",
    "bench/README.md",
    "deploy/k8s/README.md",
    "docker/README.md",
    "tests/cudasim/README.md",
    "tests/sglang_cpu/README.md",
)

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for name in PAGES:
        files.append(File.generated(config, BESIDE + name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    parts = _FENCED.split(markdown)
    parts[::2] = [relink(part, page.file.src_uri) for part in parts[::2]]
    return "".join(parts)


def relink(text: str, uri: str) -> str:
    """`text` of the page `uri` with links for the site. What the site does not have is named instead of linked."""
    here = _in_repository(uri)

    def replaced(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(here), target))
        found = _on_site(path)
        if found is not None:
            return f"[{label}]({os.path.relpath(found, os.path.dirname(uri) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs says that it is broken
        return f"`{path}`" if label.strip("`") == path else f"{label} (`{path}`)"

    return _LINK.sub(replaced, text)


def _in_repository(uri: str) -> str:
    return uri.removeprefix(BESIDE) if uri.startswith(BESIDE) else f"docs/{uri}"


def _on_site(path: str) -> str | None:
    """Where the site has a file of the repository; None where it does not."""
    for name in (path, f"{path}/README.md"):
        if name in PAGES:
            return BESIDE + name
    return path.removeprefix("docs/") if path.startswith("docs/") else None

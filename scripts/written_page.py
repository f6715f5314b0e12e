"""The command line of the scripts that write a page of docs/ from the code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def write_or_check(page: Path, text: str, script: str, about: str | None) -> int:
    """Write `text` to `page`; with --check, only say whether it is there already. The exit status."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--check", action="store_true", help=f"write nothing; exit 1 where docs/{page.name} is stale"
    )
    if not parser.parse_args().check:
        page.write_text(text, encoding="utf-8")
    elif not page.is_file() or page.read_text(encoding="utf-8") != text:
        print(f"docs/{page.name} is stale: run python scripts/{script}", file=sys.stderr)
        return 1
    return 0

"""Running the command line on small stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from gdsstore.cli.main import app
from tests.store.helpers import REPO, make_keys, opaque, save, small_store

PAGE_BYTES = 65536  # 15 pages fill a segment of 1 MiB
LIGHT = {"GDSSTORE_ENGINE": "posix", "GDSSTORE_STAGING_BYTES": "4MiB", "GDSSTORE_CHUNK_BYTES": "256KiB"}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], env=LIGHT)


def run_json(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
    """The result that a command writes to standard output, which must hold nothing else."""
    result = run(*arguments, "--json", "-")
    assert result.exit_code == exit_code, result.output
    return dict(json.loads(result.stdout))


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own."""
    command = [sys.executable, "-m", "gdsstore.cli.main", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=REPO,
        check=False,
        env={**os.environ, **LIGHT},
    )


def filled_store(path: Path, pages: int = 40) -> Path:
    """A closed store with `pages` pages: segments of 15, the last one partly filled."""
    with small_store(path) as store:
        keys = make_keys(pages)
        assert save(opaque(store, PAGE_BYTES), keys, PAGE_BYTES).all_ok
    return path

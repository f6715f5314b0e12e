"""Prints what pyproject.toml asks for, one requirement a line: `requirements.py EXTRA,EXTRA`.

The image installs these before it copies the sources, so that a change of the sources does not fetch a gigabyte again.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The dependencies of the project and of `extras`. Raises KeyError for an extra that is not there."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    found = [*project["dependencies"], *(each for extra in extras for each in optional[extra])]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), sys.argv[1].split(","))) + "\n")

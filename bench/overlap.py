"""Layer-wise loads beside a simulated forward: whether the two together take no longer than the slower one of them.

    python bench/overlap.py [--json FILE] [--quick] [--directory DIR]

bench/README.md says how it measures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from common import ROOT, Directory, Tiny, measuring, one_sentence, start
from overlap_parts import run, sizes
from overlap_parts.report import tables

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import STDOUT, Output, logs_on_stderr

Quick = Annotated[bool, typer.Option("--quick", help="64 and 256 pages only: under a minute.")]
Device = Annotated[Path | None, typer.Option("--device", hidden=True)]  # how it starts itself again
Simulated = Annotated[bool, typer.Option("--simulated", hidden=True)]


def main(
    json: JsonFile = None,
    quick: Quick = False,
    directory: Directory = None,
    quiet: Quiet = False,
    tiny: Tiny = False,
    device: Device = None,
    simulated: Simulated = False,
) -> None:
    """Load 64 to 2048 pages layer by layer beside a forward that takes 0.25, 1 and 4 times as long as the I/O, into host memory and
    into GPU memory, and compare with the I/O alone and the forward alone."""
    chosen = sizes.TINY if tiny else sizes.QUICK if quick else sizes.FULL
    size = ["--tiny"] if tiny else ["--quick"] if quick else []
    with one_sentence():
        if device is not None:
            output = Output(STDOUT, True)
            with output.status("overlap") as say, logs_on_stderr():
                found = run.run_device(device, chosen, simulated, say)
            output.show([], found)
            return
        output = Output(json, quiet)
        with measuring("overlap", output, directory) as (scratch, say):
            result = run.run(scratch, chosen, [str(Path(__file__).resolve()), *size], say, ROOT)
        output.show(tables(result), result)


if __name__ == "__main__":
    start(main)

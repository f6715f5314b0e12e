"""The direct path between drive and GPU beside a bounce through host memory, on this machine: a report with plots, and JSON.

    python bench/gds_vs_bounce.py [--quick] [--out DIR] [--path DIR] [--json FILE]

bench/README.md says how to read it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from common import ROOT, Tiny, measuring, one_sentence, start
from gds_parts import run, sizes
from gds_parts.gpu import Gpu, has_simulator, real_gpu, simulated_gpu, start_again_simulated
from gds_parts.plots import need_matplotlib
from gds_parts.report import tables, write_report

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output

Quick = Annotated[bool, typer.Option("--quick", help="Fewer cells and smaller turns: under 3 minutes.")]
Out = Annotated[Path, typer.Option(help="Where report.html, the PNG files and gds_vs_bounce.json go.")]
Where = Annotated[
    Path | None,
    typer.Option(
        "--path",
        help="A directory on the drive to measure; the bench works in a new folder in it. Default: --out.",
    ),
]
Simulated = Annotated[bool, typer.Option("--simulated", hidden=True)]  # how it starts itself again


def main(
    quick: Quick = False,
    out: Out = Path("out"),
    path: Where = None,
    json: JsonFile = None,
    quiet: Quiet = False,
    tiny: Tiny = False,
    simulated: Simulated = False,
) -> None:
    """Read and write records of 16 KiB to 16 MiB with 1 to 64 in flight, by cuFile's direct path, by bounces through host
    memory, and into host memory alone, in turn; write the numbers and a report that marks where the direct path loses."""
    with one_sentence():
        output = Output(json, quiet)
        need_matplotlib()  # now, not after an hour
        gpu = _gpu(simulated)
        out.mkdir(parents=True, exist_ok=True)
        with measuring("gds", output, path or out) as (scratch, say):
            chosen = sizes.TINY if tiny else sizes.QUICK if quick else sizes.FULL
            measured = run.run(scratch, chosen, gpu, say)
            say("the report")
            write_report(out, measured)
        output.show(tables(measured, out), measured.to_dict())


def _gpu(simulated: bool) -> Gpu:
    if simulated:
        return simulated_gpu()
    gpu = real_gpu()
    if gpu.kind == "none" and has_simulator(ROOT):
        start_again_simulated([str(Path(__file__).resolve()), *sys.argv[1:], "--simulated"])
    return gpu


if __name__ == "__main__":
    start(main)

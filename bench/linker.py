"""The direct linker: restores from this machine's drive beside the raw ceiling, beside a forward, and beside HiCache.

    python bench/linker.py [--json FILE] [--quick] [--directory DIR]

Runs in the environment of scripts/setup_sglang_venv.sh; bench/README.md says how it measures.
"""

from __future__ import annotations

from typing import Annotated

import typer
from common import ROOT, Directory, Tiny, fail, measuring, one_sentence, start
from hicache_parts.environment import has_sglang, prepare_sglang
from linker_parts import sizes
from linker_parts.report import tables

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output

Quick = Annotated[bool, typer.Option("--quick", help="64 and 256 pages only: about a minute.")]


def main(
    json: JsonFile = None,
    quick: Quick = False,
    directory: Directory = None,
    quiet: Quiet = False,
    tiny: Tiny = False,
) -> None:
    """Restore 64 to 2048 pages into a real SGLang device pool in host memory with the linker, with raw NIXL io_uring, and beside a
    forward; and load as many with HiCache's backends."""
    if not has_sglang():
        fail(
            "this bench runs SGLang's own code, and sglang is not installed; see scripts/setup_sglang_venv.sh"
        )
    with one_sentence():
        output = Output(json, quiet)
        with measuring("linker", output, directory) as (scratch, say):
            say("importing SGLang")
            prepare_sglang(ROOT)
            from linker_parts import run

            chosen = sizes.TINY if tiny else sizes.QUICK if quick else sizes.FULL
            result = run.run(scratch, chosen, say)
        output.show(tables(result), result)


if __name__ == "__main__":
    start(main)

"""SGLang's HiCache on this machine's drive: gdsstore's backend beside SGLang's `file` and `nixl`, and the raw ceiling.

    python bench/hicache.py [--json FILE] [--quick] [--directory DIR]

Runs in the environment of scripts/setup_sglang_venv.sh; bench/README.md says how it measures.
"""

from __future__ import annotations

from typing import Annotated

import typer
from common import ROOT, Directory, Tiny, fail, measuring, one_sentence, start
from hicache_parts.environment import has_sglang, prepare_sglang
from hicache_parts.report import tables

from gdsstore.cli.options import JsonFile, Quiet
from gdsstore.cli.output import Output

Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds, and look-ups among 10,000 pages only.")]
HostAllocator = Annotated[
    bool,
    typer.Option(
        "--host-allocator", help="The host pool in gdsstore's huge pages instead of SGLang's memory."
    ),
]


def main(
    json: JsonFile = None,
    quick: Quick = False,
    directory: Directory = None,
    host_allocator: HostAllocator = False,
    quiet: Quiet = False,
    tiny: Tiny = False,
) -> None:
    """Save, load and look up pages of a real SGLang host pool with gdsstore's HiCache backend, with SGLang's file and nixl
    backends, and with raw NIXL io_uring, in turn."""
    if not has_sglang():
        fail(
            "this bench runs SGLang's own code, and sglang is not installed; see scripts/setup_sglang_venv.sh"
        )
    with one_sentence():
        output = Output(json, quiet)
        with measuring("hicache", output, directory) as (scratch, say):
            say("importing SGLang")
            prepare_sglang(ROOT)
            from hicache_parts import run

            sizes = run.TINY if tiny else run.QUICK if quick else run.FULL
            result = run.run(scratch, sizes, say, host_allocator=host_allocator)
        output.show(tables(result), result)


if __name__ == "__main__":
    start(main)

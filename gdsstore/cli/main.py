"""The command line: `gdsstore doctor | format | replay | bench | inspect | verify | drill | stats | serve | top`."""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import gdsstore
from gdsstore.cli import bench
from gdsstore.cli.doctor import doctor
from gdsstore.cli.drill import drill
from gdsstore.cli.format import format_
from gdsstore.cli.inspect import inspect
from gdsstore.cli.output import logs_on_stderr
from gdsstore.cli.replay import replay
from gdsstore.cli.serve import serve
from gdsstore.cli.stats import stats
from gdsstore.cli.top import top
from gdsstore.cli.verify import verify
from gdsstore.errors import GdsStoreError, from_os_error

CANNOT_RUN = 2


class _OneLineErrors(TyperGroup):
    """What the library raises on purpose is for people: one line, and no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GdsStoreError as error:
            failure = error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output is gone, which click ends quietly
            failure = from_os_error(error, "it failed", GdsStoreError)
        text = " ".join(str(failure).split())
        Console(stderr=True).print(
            f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(CANNOT_RUN)


app = typer.Typer(
    cls=_OneLineErrors,
    help="KV-cache pages of LLM servers on local NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor)
app.command("format")(format_)
app.command("replay")(replay)
app.add_typer(bench.app, name="bench")
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("drill")(drill)
app.command("stats")(stats)
app.command("serve")(serve)
app.command("top")(top)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gdsstore {gdsstore.__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """KV-cache pages of LLM servers on local NVMe: verified on every read, restart-proof."""
    context.with_resource(logs_on_stderr())


if __name__ == "__main__":
    app()

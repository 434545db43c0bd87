"""The `halotile` command. Exit codes: 0 done, 1 a promise is broken, 2 it could not be done (one line says why)."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import halotile
from halotile.cli.bench import bench
from halotile.cli.calibrate import calibrate
from halotile.cli.decode import decode
from halotile.cli.demo import demo
from halotile.cli.encode import encode
from halotile.cli.launch import one_line, torchrun_world
from halotile.cli.ops import ops
from halotile.cli.plan import plan
from halotile.cli.verify import verify

app = typer.Typer(
    help="Decode and encode diffusion autoencoders over the ranks of a torch.distributed group.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit code 1: a promised equality is broken. 2: it could not be done, and one line on stderr says why.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"halotile {halotile.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself; typer shows the help of `app`."""


for command in (demo, encode, decode, verify, plan, bench, calibrate, ops):
    app.command()(command)


def run() -> None:
    """The console entry: any error is one line on standard error; HALOTILE_TRACEBACK=1 shows where it came from."""
    try:
        app()
    except Exception as error:
        if os.environ.get("HALOTILE_TRACEBACK"):
            raise
        rank = f" (rank {os.environ['RANK']})" if torchrun_world() else ""
        print(f"halotile{rank}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
